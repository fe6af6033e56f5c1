# `make` alone lists the targets. Everything is installed into virtual environments inside this folder, nothing elsewhere
# but torch_npu and the vendor's compiler, which go to the cache folder ($XDG_CACHE_HOME/npu-backend, else
# ~/.cache/npu-backend).
#
#   PYTHON        the Python to build on, 3.10 to 3.12   (default: the first found of python3, python3.11, ...)
#   TORCH_SPEC    the torch to test with                 (default: torch==2.13.0)
#   TRANSFORMERS  4 or 5, the one of `make test-other`   (default: 5)
#   PIP_ARGS      further arguments of `pip install`     (for example: --extra-index-url URL of CPU builds)
#   DEMO_ARGS     arguments of `npu-backend demo`        (for example: --use-liger)

PYTHON ?=
TORCH_SPEC ?= torch==2.13.0
TRANSFORMERS ?= 5
PIP_ARGS ?=
DEMO_ARGS ?=

# releases of verl that `make test-all` tries besides that of requirements/verl.txt
OTHER_VERL := 0.9.0 0.8.0 0.7.1

# what `make test-system` needs of Debian
DEBIAN_TOOLS := buildah chromium debootstrap fish fonts-noto-cjk zsh

# python3 -m venv, pip install; $@ is the stamp .venv*/.ready
new_venv = set -e; python=$$(sh .ci/find-python $(PYTHON)); echo "making $(@D); this takes minutes"; "$$python" -m venv --clear $(@D)
pip_install = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
add_missing = $(@D)/bin/python .ci/add_missing.py

.DEFAULT_GOAL := help
.PHONY: help demo dist docs test test-all test-other test-torch-npu test-system lint format clean fetch-torch-npu fetch-toolchain

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

docs: .venv-docs/.ready  ## build the documentation, English and Chinese: build/site/index.html
	@.venv-docs/bin/python -m sphinx -q -W --keep-going docs build/site && echo "make docs: build/site/index.html"

test: .venv/.installed .venv-tf4/.installed .venv-docs/.ready fetch-torch-npu fetch-toolchain  ## lint and every test but the slow ones, on both transformers
	@.venv/bin/python .ci/checks.py test

test-all: test $(OTHER_VERL:%=.venv-verl-%/.installed)  ## the same, then the slow tests: hours; tests/slow_tests.md has the last result
	@.venv/bin/python .ci/checks.py slow

# An environment of its own, new each time. An empty TORCH_SPEC is no torch: what has to work without one is tested.
test-other:  ## the CPU tests on another Python and torch: make test-other PYTHON=python3.10 TORCH_SPEC=torch==2.5.1 TRANSFORMERS=4
	@rm -rf .venv-other
	@$(MAKE) --no-print-directory .venv-other/.installed
	@.venv-other/bin/python .ci/other_versions.py

# Its own environment, so that the release of torch_npu can differ: the one of TORCH_SPEC.
test-torch-npu:  ## the virtual NPU on another release: make test-torch-npu TORCH_SPEC=torch==2.10.0
	@set -e; venv=.venv-torch-npu; "$$(sh .ci/find-python $(PYTHON))" -m venv $$venv; \
	$$venv/bin/python -m pip install --quiet $(PIP_ARGS) "$(TORCH_SPEC)" numpy packaging pytest pytest-timeout expecttest; \
	PYTHONPATH=. $$venv/bin/python .ci/fetch_torch_npu.py $(PIP_ARGS); \
	OMP_NUM_THREADS=1 PYTHONPATH=. $$venv/bin/python -m npu_backend run --virtual-npu=2 -- $$venv/bin/python -m pytest -q \
		tests/virtual_npu/test_npu_*.py tests/virtual_npu/test_runtime*.py tests/virtual_npu/test_optimizers.py tests/virtual_npu/test_distributed.py

# In continuous integration on Debian as root the tools are installed; elsewhere a test without its tools is "not run".
test-system: .venv/.installed .venv-docs/.ready  ## tests that need root or Debian's tools: an image built for real, the site in a browser, other shells
	@if [ -n "$$CI" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(DEBIAN_TOOLS) >/dev/null \
			|| echo "test-system: Debian's packages $(DEBIAN_TOOLS) cannot be had"; \
	fi
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -rs --durations=5 tests/system tests/cli/test_completion.py

# The bill of materials is that of an environment with the wheel, what it asks for in tested releases, and no pip.
dist: .venv-release/.ready  ## a release: wheel and sdist in dist/; build/sbom.cdx.json, what the wheel brings along
	@set -e; rm -rf dist .venv-sbom; python=.venv-release/bin/python; $$python -m build --no-isolation; \
	$$python -m venv --without-pip .venv-sbom; install="$$python -m pip --python .venv-sbom/bin/python install --quiet"; \
	$$install --no-deps --no-index --find-links dist npu-backend; \
	$$install $(PIP_ARGS) -c requirements/constraints.txt -c requirements/demo.txt "$(TORCH_SPEC)" npu-backend; \
	mkdir -p build; $$python -m cyclonedx_py environment --output-reproducible --gather-license-texts \
		-o build/sbom.cdx.json .venv-sbom/bin/python

lint: .venv/.installed  ## ruff, mypy, import-linter
	@.venv/bin/python .ci/checks.py lint

format: .venv/.installed  ## let ruff rewrite what it can
	.venv/bin/python -m ruff check --fix
	.venv/bin/python -m ruff format

clean:  ## remove the environments and everything that was built
	rm -rf .venv .venv-tf4 .venv-docs .venv-demo .venv-other .venv-release .venv-sbom .venv-torch-npu .venv-verl-* build dist .*_cache .hypothesis

fetch-torch-npu: .venv/.installed
	@.venv/bin/python .ci/fetch_torch_npu.py $(PIP_ARGS)

fetch-toolchain: .venv/.installed
	@.venv/bin/python .ci/fetch_toolchain.py $(PIP_ARGS)

REQUIREMENTS := $(filter-out requirements/docs.txt,$(wildcard requirements/*.txt))

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

# as .venv or .venv-tf4
.venv-other/.ready: $(REQUIREMENTS)
	@$(new_venv)
	$(pip_install) $(if $(TORCH_SPEC),"$(TORCH_SPEC)" -r requirements/transformers$(TRANSFORMERS).txt,-r requirements/torch_free.txt)
	$(if $(and $(TORCH_SPEC),$(filter 5,$(TRANSFORMERS))),$(add_missing) requirements/no-deps.txt --quiet --no-deps $(PIP_ARGS))
	$(if $(and $(TORCH_SPEC),$(filter 5,$(TRANSFORMERS))),$(add_missing) requirements/verl.txt --quiet --no-deps $(PIP_ARGS))
	touch $@

.venv-release/.ready: requirements/release.txt requirements/constraints.txt
	@$(new_venv)
	$(pip_install) -r requirements/release.txt
	touch $@

.venv-docs/.ready: requirements/docs.txt
	@$(new_venv)
	$(pip_install) -r requirements/docs.txt
	touch $@

# .venv, but for another release of verl, which stands before it on the path.
.venv-verl-%/.ready: .venv/.ready
	@$(new_venv)
	echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python3*/site-packages)')" \
		> $$(echo $(@D)/lib/python3*/site-packages)/main.pth
	$(pip_install) --no-deps verl==$*
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

.PRECIOUS: %/.ready .venv-verl-%/.ready
