# Each target sets up what it needs. PYTHON is any Python from 3.11 on.
PYTHON ?= python3
BIN := .venv/bin
# Compiled tests are kept: to compile them again takes every process of pytest five seconds.
unexport PYTHONDONTWRITEBYTECODE
READY := .venv/.ready

.PHONY: help demo test slow smoke results generated docs docs-serve check bench zoo goldens pages examples gallery install-check fuzz \
	versus soak clean
help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY) ## train 4 members, distill and merge them, evaluate everything, write runs/demo
	rm -rf runs/demo
	$(BIN)/enfold demo runs/demo

test: $(READY) ## the tests, in about two minutes on two free cores
	$(BIN)/python -m pytest -n 2 --dist worksteal

slow: $(READY) ## the tests that train longer, all combinations of parameters, the smoke scale of the studies
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

goldens: $(READY) ## record the values of every method again, in tests/goldens; read the diff before you commit it
	$(BIN)/python -m tests.goldens.record
	$(BIN)/python -m tests.goldens.record demo

smoke: $(READY) ## run every study at the smoke scale, on data that ships with enfold
	$(BIN)/python -m pytest -n 2 -m slow --timeout 600 tests/studies

results: $(READY) ## check that the pages agree with the stored results
	$(BIN)/python -m studies.check
	$(BIN)/python -m pytest -m records tests/studies

generated: $(READY) ## write what is generated from the methods and committed: docs/methods.md, names for type checkers
	$(BIN)/python tools/make_method_names.py
	$(BIN)/python tools/make_methods_page.py

docs: $(READY) ## build the documentation site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python tools/check_site.py build/site

docs-serve: $(READY) ## show the documentation site on this machine while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

pages: $(READY) ## run the code of the README and of the documentation
	OMP_NUM_THREADS=1 $(BIN)/python tools/run_pages.py

check: $(READY) ## format, lint, types, layers, spelling, generated files, stored results, tests, code of the pages, site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/typos
	$(BIN)/python tools/make_method_names.py --check
	$(BIN)/python tools/make_methods_page.py --check
	$(BIN)/python tools/draw_readme_figure.py --check
	$(MAKE) --no-print-directory results test pages docs

install-check: ## install into an empty environment, start every verb: core, all extras, lowest versions
	$(PYTHON) tools/check_install.py

bench: $(READY) ## ratios to one network, in one process
	$(BIN)/python bench/members.py
	$(BIN)/python bench/batches.py
	$(BIN)/python bench/efficient_ensembles.py
	$(BIN)/python bench/distillation.py
	$(BIN)/python bench/corruptions.py
	$(BIN)/python bench/merging.py
	$(BIN)/python bench/matching.py
	$(BIN)/python bench/matching.py --large
	$(BIN)/python bench/landscape.py
	$(BIN)/python bench/report.py
	$(BIN)/python bench/export.py
	$(BIN)/python bench/serving.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/predictions.py
	$(BIN)/python bench/streams.py

VERSUS := .venv-versus/.ready
$(VERSUS): pyproject.toml constraints.txt bench/versus/requirements.txt
	$(PYTHON) -m venv .venv-versus
	.venv-versus/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[report]' \
		--requirement bench/versus/requirements.txt
	touch $(VERSUS)

versus: $(VERSUS) ## enfold beside other packages, in about an hour of a quiet machine; VERSUS_OPTIONS=--cpu if it is not quiet
	PYTHONPATH=bench .venv-versus/bin/python -m versus $(VERSUS_OPTIONS)

EXAMPLES := .venv/.examples
$(EXAMPLES): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,examples]'
	touch $(EXAMPLES)

examples: $(EXAMPLES) ## run and check the examples and the notebooks, in about two minutes on two free cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --timeout 600 -m "slow or not slow" --durations=30 \
		tests/test_examples.py tests/test_notebook.py tests/test_uncertainty_notebook.py

gallery: $(EXAMPLES) ## run the examples and the notebooks, and store what they print and draw for the site
	$(BIN)/python tools/record_examples.py

ZOO := .venv-zoo/.ready
$(ZOO): pyproject.toml constraints.txt tools/zoo/requirements.txt
	$(PYTHON) -m venv .venv-zoo
	.venv-zoo/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . \
		--requirement tools/zoo/requirements.txt
	touch $(ZOO)

zoo: $(ZOO) ## test enfold with networks of thirty packages, in about an hour
	OMP_NUM_THREADS=1 .venv-zoo/bin/python -m tools.zoo

fuzz: $(READY) ## read 135,000 damaged and hostile inputs of every kind, in about ten minutes on a free core
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.fuzz --out results/fuzz.json

soak: $(READY) ## kill a small run at 200 random moments and stop it at 40: the bits must not change
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.soak --out results/soak.json

clean: ## remove the environments and runs of these targets
	rm -rf .venv .venv-zoo .venv-versus runs
