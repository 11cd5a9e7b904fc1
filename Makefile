# Short names for the commands of CONTRIBUTING.md. The environment .venv is used where there is one.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help test lint docs bench gate

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

test: ## Run the default tests; make test ARGS="tests/test_policy.py -k rounded" runs some of them
	python -m pytest $(ARGS)

lint: ## Run ruff, mypy and clang-format as the gate does
	ruff check .
	ruff format --check .
	mypy
	git ls-files csrc tests/cpp tests/emulated_cuda | grep -E '\.(h|cpp|cu|cuh)$$' | \
		xargs clang-format --dry-run -Werror

docs: ## Build the documentation into site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

bench: ## Run the codec's benchmark on tiny inputs; make bench ARGS= runs it in full
	python benchmarks/bench_codec.py $(ARGS)
bench: ARGS = --smoke

gate: ## Run everything that a pull request must pass, in a quarter of an hour
	.ci/run $(ARGS)
