PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := dev,peers,export,detection,audio,rl
# Two workers with one torch thread each (tests/conftest.py) use two cores better than one worker with two threads.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types format results benchmark clothing bccd emoji digits speech mujoco wheel clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */\1|/' | awk -F'|' '{ printf "  make %-9s %s\n", $$1, $$2 }'

setup: $(STAMP)  ## create .venv and install the suite with what its tests need

# Installed again only when what is required changed.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --editable ".[$(EXTRAS)]" --constraint constraints.txt
	@touch $@

demo: $(STAMP)  ## train a Vision Transformer on handwritten digits (about two minutes on two cores)
	$(BIN)/multimodal fit vit

lint: $(STAMP)  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy over both packages
	$(BIN)/mypy

test: lint types  ## lint, types and every test
	$(BIN)/python -m pytest -n $(WORKERS)

format: $(STAMP)  ## rewrite the sources as ruff formats them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

results: $(STAMP)  ## measure every figure again (docs/results.md and its pictures; over an hour and a half, on idle cores)
	$(BIN)/python benchmarks/attention_kernels.py
	$(BIN)/python benchmarks/linear.py
	$(BIN)/python benchmarks/vit_vs_timm.py
	$(BIN)/python benchmarks/digits.py
	$(BIN)/torchrun --nproc_per_node 2 benchmarks/validation_count.py
	$(BIN)/python benchmarks/kills.py
	$(BIN)/python benchmarks/fit_overhead.py
	$(BIN)/python benchmarks/scenes.py
	$(BIN)/python benchmarks/detr_vs_hf.py
	$(BIN)/python benchmarks/dt_cartpole.py
	$(BIN)/python benchmarks/dt_vs_hf.py
	$(BIN)/python benchmarks/clip_scenes.py
	$(BIN)/python benchmarks/clip_vs_open_clip.py
	$(BIN)/python benchmarks/morse.py

benchmark: $(STAMP)  ## measure all tasks beside their published implementations (docs/benchmarks.md; over an hour, on idle cores)
	$(BIN)/multimodal benchmark --size published --peers --json docs/benchmarks.json --markdown docs/benchmarks.md --html docs/benchmarks.html

clothing: $(STAMP)  ## measure the clothing figures (about an hour): make clothing ROOT=clothing-dataset-small
	for seed in 0 1 2; do for which in ours timm recipe; do \
	  $(BIN)/python benchmarks/clothing.py --which $$which --seed $$seed --root $(ROOT) || exit 1; done; done
	$(BIN)/python benchmarks/clothing.py

bccd: $(STAMP)  ## measure the blood cell figures (half an hour): make bccd ROOT=BCCD WEIGHTS=tf_efficientnet_lite0.safetensors
	$(BIN)/python benchmarks/bccd.py --root $(ROOT) --weights $(WEIGHTS)

emoji: $(STAMP)  ## measure the figures of captioned emoji (three quarters of an hour a seed): make emoji ROOT=EMOJI
	for seed in 0 1 2; do for which in ours open_clip float32 recipe; do \
	  $(BIN)/python benchmarks/emoji.py --which $$which --seed $$seed --root $(ROOT) || exit 1; done; done
	$(BIN)/python benchmarks/emoji.py

digits: $(STAMP)  ## measure the figures of spoken digits (eight minutes): make digits ROOT=FSDD
	$(BIN)/python benchmarks/fsdd.py --root $(ROOT)

speech: $(STAMP)  ## measure the speed of transcription (ten minutes, idle cores): make speech ROOT=UTTERANCES WEIGHTS=tiny.en.pt
	$(BIN)/python benchmarks/whisper_speed.py --root $(ROOT) --weights $(WEIGHTS)

mujoco: $(STAMP)  ## measure the figures of Hopper and HalfCheetah (an hour): make mujoco ROOT=FOLDER
	$(BIN)/python benchmarks/dt_mujoco.py --root $(ROOT) --name hopper
	$(BIN)/python benchmarks/dt_mujoco.py --root $(ROOT) --name halfcheetah

wheel: $(STAMP)  ## build the source distribution and, from it, the wheel
	$(BIN)/python -m build

clean:  ## remove what was built (keeps .venv and runs/)
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
	find multimodal tasks tests -name __pycache__ -type d -prune -exec rm -rf {} +
