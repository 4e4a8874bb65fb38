"""scikit-learn: an ensemble and a compressed ensemble for a table with names of columns and classes."""

from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from enfold.integrations.sklearn import CompressedClassifier, EnsembleClassifier


def main() -> None:
    """Search for the width, compress, and find the rows of which the ensemble is least certain."""
    frame, codes = load_digits(return_X_y=True, as_frame=True)
    labels = codes.map(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"].__getitem__)
    train, test, train_labels, test_labels = train_test_split(frame, labels, test_size=0.6, random_state=0)

    search = GridSearchCV(
        make_pipeline(StandardScaler(), EnsembleClassifier(num_members=3, epochs=10, random_state=0)),
        {"ensembleclassifier__hidden": [(16,), (64,)]},
        cv=2,
    ).fit(train, train_labels)
    hidden = search.best_params_["ensembleclassifier__hidden"]

    models = {
        "MLPClassifier": make_pipeline(StandardScaler(), MLPClassifier(hidden, max_iter=1000, random_state=0)),
        "ensemble": EnsembleClassifier(num_members=3, hidden=hidden, epochs=30, random_state=0),
        "distilled": CompressedClassifier(num_members=3, hidden=hidden, epochs=30, random_state=0),
    }
    for name, model in models.items():
        score = model.fit(train, train_labels).score(test, test_labels)
        print(f"{name}: accuracy {100 * score:.1f} %")

    uncertainty = models["ensemble"].predict_uncertainty(test)
    hardest = test.assign(label=test_labels, prediction=models["ensemble"].predict(test), nats=uncertainty.total)
    print(hardest.nlargest(3, "nats")[["label", "prediction", "nats"]].to_string(index=False))
    print(models["distilled"].report_.split("\n\n")[0])


if __name__ == "__main__":
    main()
