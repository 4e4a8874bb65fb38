"""Estimators for scikit-learn."""

import pickle
import sys

import numpy as np
import pytest
import torch
from torch import nn

from enfold import EnfoldError
from enfold.errors import MissingExtra

pytest.importorskip("sklearn", minversion="1.6")
from sklearn.base import clone
from sklearn.datasets import make_classification, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from enfold.integrations.sklearn import (
    CompressedClassifier,
    CompressedRegressor,
    EnsembleClassifier,
    EnsembleRegressor,
)

pytestmark = pytest.mark.filterwarnings("ignore:the . members are nearly:UserWarning")
SMALL = {"num_members": 2, "hidden": (16,), "epochs": 8, "lr": 5e-2}
FAILS = {
    "check_sample_weight_equivalence_on_dense_data": "in batches of a random order, a weight of 2 is a row twice "
    "on average only, as for MLPClassifier"
}


def checks(*estimators):
    return parametrize_with_checks(estimators, expected_failed_checks=lambda estimator: FAILS)


@pytest.mark.slow
@checks(EnsembleClassifier(**SMALL))
def test_the_classifier_passes_the_checks_of_sklearn(estimator, check):
    check(estimator)


@pytest.mark.slow
@checks(EnsembleRegressor(**SMALL), CompressedClassifier(**SMALL), CompressedRegressor(**SMALL))
def test_the_others_pass_the_checks_of_sklearn(estimator, check):
    check(estimator)


def make_network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def classes(names=("no", "yes", "maybe")):
    rows, codes = make_classification(150, 5, n_informative=4, n_redundant=0, n_classes=3, class_sep=2, random_state=0)
    return rows, np.array(names)[codes]


def test_labels_may_be_strings_and_probabilities_follow_classes():
    rows, labels = classes()
    model = EnsembleClassifier(**SMALL, random_state=0).fit(rows, labels)
    assert list(model.classes_) == ["maybe", "no", "yes"]
    assert model.score(rows, labels) > 0.8
    found = model.predict_proba(rows)
    assert found.shape == (150, 3)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)
    with torch.no_grad():  # by hand
        inputs = torch.tensor((rows - rows.mean(0)) / rows.std(0), dtype=torch.float32)
        mean = model.ensemble_(inputs).softmax(-1).mean(0)
    np.testing.assert_allclose(found, mean, atol=1e-6)


def test_uncertainty_has_an_aleatoric_and_an_epistemic_part():
    rows, labels = classes()
    model = EnsembleClassifier(**SMALL, random_state=0).fit(rows, labels)
    found = model.predict_uncertainty(rows)
    np.testing.assert_allclose(found.total, found.aleatoric + found.epistemic, atol=1e-9)
    assert model.predict_uncertainty(20 * rows).epistemic.mean() != found.epistemic.mean()


def test_a_regression_is_in_the_unit_of_its_targets():
    rows, values = make_regression(200, 4, n_informative=4, noise=5.0, random_state=0)
    values = 1000 + 50 * values
    model = EnsembleRegressor(**SMALL | {"epochs": 40}, random_state=0).fit(rows, values)
    assert model.score(rows, values) > 0.8
    mean, std = model.predict(rows, return_std=True)
    np.testing.assert_allclose(mean, model.predict(rows))
    np.testing.assert_allclose(std**2, model.predict_uncertainty(rows).total, rtol=1e-6)
    assert 0.3 < (np.abs(mean - values) < std).mean() <= 1  # 68 % for a normal distribution


def test_a_dataframe_with_other_columns_is_refused():
    pandas = pytest.importorskip("pandas")
    rows, labels = classes()
    frame = pandas.DataFrame(rows, columns=list("abcde"))
    model = EnsembleClassifier(**SMALL).fit(frame, pandas.Series(labels))
    assert list(model.feature_names_in_) == list("abcde")
    for wrong in (frame[list("edcba")], frame.rename(columns={"a": "z"}), frame.drop(columns="e")):
        with pytest.raises(ValueError, match="feature names"):
            model.predict(wrong)


def test_pickles_have_arrays_and_give_the_same_predictions():
    rows, labels = classes()
    for options in ({}, {"method": "BatchEnsemble", "method_options": {"rank": 2}}, {"method": "MIMO"}):
        model = EnsembleClassifier(make_network, **SMALL, **options, random_state=0).fit(rows, labels)
        data = pickle.dumps(model)
        assert b"torch" not in data.replace(b"enfold", b"")
        loaded = pickle.loads(data)  # noqa: S301 - written here
        np.testing.assert_array_equal(loaded.predict_proba(rows), model.predict_proba(rows))
        assert type(loaded.ensemble_) is type(model.ensemble_)


def test_a_compressed_classifier_is_one_network_of_the_factory():
    rows, labels = classes()
    model = CompressedClassifier(make_network, **SMALL, random_state=0).fit(rows, labels)
    assert type(model.network_) is nn.Sequential
    assert "control" in model.report_
    assert model.score(rows, labels) > 0.8
    assert pickle.loads(pickle.dumps(model)).predict(rows).tolist() == model.predict(rows).tolist()  # noqa: S301


def test_it_works_in_a_pipeline_a_grid_search_and_clone():
    rows, labels = classes()
    pipeline = make_pipeline(MinMaxScaler(), EnsembleClassifier(**SMALL, random_state=0))
    grid = {"ensembleclassifier__method": ["DeepEnsemble", "BatchEnsemble"], "ensembleclassifier__hidden": [(8,)]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(rows, labels)
    assert search.best_score_ > 0.6
    model = EnsembleClassifier(**SMALL, train_options={"clip_norm": 1.0})
    assert clone(model).get_params() == model.get_params()


def test_a_weight_is_a_number_of_repetitions_with_all_rows_in_one_batch():
    rows, labels = classes()
    weights = np.random.RandomState(0).randint(0, 3, len(rows))
    options = SMALL | {"batch_size": 1000, "epochs": 5, "validation_fraction": 0.0, "random_state": 0}
    found = EnsembleClassifier(**options).fit(rows, labels, weights).predict_proba(rows)
    wanted = EnsembleClassifier(**options).fit(rows.repeat(weights, 0), labels.repeat(weights)).predict_proba(rows)
    np.testing.assert_allclose(found, wanted, atol=1e-3)
    assert abs(found - EnsembleClassifier(**options).fit(rows, labels).predict_proba(rows)).max() > 1e-2


def test_validation_rows_are_spread_over_the_classes():
    model = EnsembleClassifier(validation_fraction=0.2)
    model._seed_ = 0
    targets = torch.tensor([0] * 40 + [1] * 20 + [2] * 10)
    train, val = model._split(targets)
    assert sorted(torch.cat([train, val]).tolist()) == list(range(70))
    assert targets[val].bincount().tolist() == [8, 4, 2]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"method": "DeepEnsembel"}, "method"),
        ({"validation_fraction": 1.5}, "validation_fraction"),
        ({"epochs": -1}, "epochs"),
        ({"train_options": {"momentun": 0.9}}, "momentun"),
        ({"num_members": 0}, "num_members"),
        ({"method": 3}, "method"),
        ({"network": nn.Linear(5, 3)}, "network"),
        ({"network": lambda columns, outputs: None}, "factory"),
        ({"network": lambda columns, outputs: nn.Linear(columns, 2)}, "outputs"),
        ({"network": lambda columns, outputs: nn.Linear(columns, 5)}, "outputs"),
    ],
)
def test_invalid_options_are_refused_by_name(options, name):
    rows, labels = classes()
    with pytest.raises(EnfoldError, match=name):
        EnsembleClassifier(**SMALL | options).fit(rows, labels)


def test_invalid_rows_are_refused():
    rows, labels = classes()
    model = EnsembleClassifier(**SMALL)
    with pytest.raises(NotFittedError):
        model.predict(rows)
    with pytest.raises(EnfoldError, match="2 classes"):
        model.fit(rows, ["a"] * len(rows))
    with pytest.raises(EnfoldError, match="sample_weight"):
        model.fit(rows, labels, -np.ones(len(rows)))
    with pytest.raises(EnfoldError, match="validation_fraction"):
        CompressedClassifier(**SMALL | {"validation_fraction": 0.0}).fit(rows, labels)
    with pytest.raises(TypeError, match="sample_weight"):
        CompressedClassifier(**SMALL).fit(rows, labels, sample_weight=np.ones(len(rows)))


def test_a_missing_package_is_named_with_its_install_line(monkeypatch):
    for name in ("sklearn", "sklearn_base"):
        monkeypatch.delitem(sys.modules, f"enfold.integrations.{name}")
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(MissingExtra, match=r"enfold\[sklearn\]"):
        import enfold.integrations.sklearn  # noqa: F401
