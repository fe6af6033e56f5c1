# `make` alone lists the targets. Everything is installed into virtual environments inside this folder, nothing elsewhere
# but torch_npu, which goes to the cache folder ($XDG_CACHE_HOME/npu-backend, else ~/.cache/npu-backend).
#
#   PYTHON      the Python to build on, 3.10 to 3.12     (default: the first found of python3, python3.11, ...)
#   TORCH_SPEC  the torch to test with                   (default: torch==2.13.0)
#   PIP_ARGS    further arguments of `pip install`       (for example: --extra-index-url URL of CPU builds)
#   DEMO_ARGS   arguments of `npu-backend demo`          (for example: --use-liger)

PYTHON ?=
TORCH_SPEC ?= torch==2.13.0
PIP_ARGS ?=
DEMO_ARGS ?=

# python3 -m venv, pip install; $@ is the stamp .venv*/.ready
new_venv = set -e; python=$$(sh .ci/find-python $(PYTHON)); echo "making $(@D); this takes minutes"; "$$python" -m venv --clear $(@D)
pip_install = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
add_missing = $(@D)/bin/python .ci/add_missing.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-system lint format clean fetch-torch-npu

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo:  ## run the main job on a real pretrained model
	@set -e; python=$$(sh .ci/find-python $(PYTHON)); venv=.venv; \
	if "$$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then \
		venv=.venv-demo; echo "make demo: using the torch of $$python"; \
	fi; \
	$(MAKE) --no-print-directory $$venv/.installed; \
	$$venv/bin/python .ci/fetch_torch_npu.py $(PIP_ARGS) || echo "make demo: no torch_npu for this torch, so no virtual NPU"; \
	$$venv/bin/python -m npu_backend demo $(DEMO_ARGS)

test: .venv/.installed .venv-tf4/.installed fetch-torch-npu  ## lint and every test but the slow ones, on both transformers
	@.venv/bin/python .ci/checks.py test

test-all: .venv/.installed .venv-tf4/.installed fetch-torch-npu  ## the same with the slow tests
	@.venv/bin/python .ci/checks.py test-all

test-system:  ## tests that need root and Debian's tools
	@echo "test-system: there are no such tests yet"

lint: .venv/.installed  ## ruff, mypy, import-linter
	@.venv/bin/python .ci/checks.py lint

format: .venv/.installed  ## let ruff rewrite what it can
	.venv/bin/python -m ruff check --fix
	.venv/bin/python -m ruff format

clean:  ## remove the environments and everything that was built
	rm -rf .venv .venv-tf4 .venv-demo build dist .*_cache .hypothesis

fetch-torch-npu: .venv/.installed
	@.venv/bin/python .ci/fetch_torch_npu.py $(PIP_ARGS)

REQUIREMENTS := $(wildcard requirements/*.txt)

.venv/.ready: $(REQUIREMENTS)
	@$(new_venv)
	$(pip_install) "$(TORCH_SPEC)" -r requirements/transformers5.txt
	$(add_missing) requirements/no-deps.txt --quiet --no-deps $(PIP_ARGS)
	$(add_missing) requirements/verl.txt --quiet --no-deps $(PIP_ARGS)
	touch $@

.venv-tf4/.ready: $(REQUIREMENTS)
	@$(new_venv)
	$(pip_install) "$(TORCH_SPEC)" -r requirements/transformers4.txt
	touch $@

# On a host with torch (an Ascend image): its packages are seen and kept, also where its Python is itself a virtual
# environment (so not --system-site-packages). Nothing that is added depends on torch, so pip cannot move it.
.venv-demo/.ready: $(REQUIREMENTS)
	@$(new_venv); "$$python" -c 'import sys; print("import site;", *(f"site.addsitedir({p!r});" for p in sys.path if p.endswith("-packages")))' \
		> $$(echo $(@D)/lib/python3*/site-packages)/host.pth
	$(add_missing) requirements/demo.txt --quiet $(PIP_ARGS)
	$(add_missing) requirements/no-deps.txt --quiet --no-deps $(PIP_ARGS)
	touch $@

%/.installed: %/.ready pyproject.toml
	$(pip_install) --no-deps --editable .
	touch $@

.PRECIOUS: %/.ready
