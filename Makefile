# make serve   start the demo on this machine
# make test    everything that has to pass before a change lands
# make lint    the static half of it
# make test-clients  real client programs against a running server, each in an environment of its own
# make format  let ruff rewrite what it can
# make k8s-files  renew what k8s/ embeds of deploy/: the deploy file and the alerts
#
# Each target installs what it needs into .venv; nothing has to be run before it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test
PYTEST_ARGS ?=
CLIENTS_ARGS ?=
K8S ?= k8s

.PHONY: install install-test serve test test-clients lint format k8s-files clean
install: $(INSTALLED)
install-test: $(INSTALLED_TEST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and f"Python {v} is too old: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); the first time this takes a few minutes"
	$(PIP) --constraint constraints.txt --editable .
	touch $@

# The reference package pins old releases of its dependencies and a newer Python, so it comes
# without either; the tests show that it runs with what constraints.txt names. litellm comes for one
# file: the ranks of the published checkpoints' tokenizer, which tiktoken would download.
$(INSTALLED_TEST): $(INSTALLED)
	$(PIP) --constraint constraints.txt --editable '.[test]'
	$(PIP) --no-deps --ignore-requires-python steerling==0.2.0 litellm==1.110.2
	touch $@

serve: $(INSTALLED)
	$(BIN)/python -m serve_app.run

lint: $(INSTALLED_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy engine serve_app
	$(BIN)/mypy --strict --namespace-packages --explicit-package-bases -p deploy.grafana

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

test-clients: $(INSTALLED_TEST)
	$(BIN)/python -m tests.clients.run $(CLIENTS_ARGS)

format: $(INSTALLED_TEST)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

k8s-files:
	@mkdir -p $(K8S)/base $(K8S)/components/monitoring
	@{ printf '%s\n' '# Generated from deploy/steerling-8b.yaml by `make k8s-files`; change it there.' \
	  'apiVersion: ray.io/v1' 'kind: RayService' 'metadata:' '  name: glassblock' 'spec:' '  serveConfigV2: |'; \
	  sed 's/^./    &/' deploy/steerling-8b.yaml; } > $(K8S)/base/serve-config.yaml
	@{ printf '%s\n' '# Generated from deploy/prometheus/alerts.yml by `make k8s-files`; change it there.' \
	  'apiVersion: monitoring.coreos.com/v1' 'kind: PrometheusRule' 'metadata:' '  name: glassblock' '  labels:' \
	  '    app.kubernetes.io/name: glassblock' '    release: prometheus' 'spec:'; \
	  sed 's/^./  &/' deploy/prometheus/alerts.yml; } > $(K8S)/components/monitoring/alerts.yaml

clean:
	rm -rf $(VENV) .venv-clients .mypy_cache .pytest_cache .ruff_cache .hypothesis
