"""The configuration of a reinforcement learning job. The field descriptions are the only documentation of a key:
`--help` and docs/CONFIG.md are generated from them.

Unknown keys, wrong types and out-of-range numbers are refused here. Rules that span keys are in configs/rules and are
applied by configs.reading.load; rules that need the machine or the files are in orchestration/start/preflight.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_serializer, model_validator

from configs.blocks.block import Block, Named, error_at, located
from configs.blocks.capture import Capture
from configs.blocks.lora import Lora
from configs.blocks.objective import Critic, Filter, Objective
from configs.blocks.placement import Placement
from configs.blocks.schedule import Failures, Schedule
from configs.blocks.source import Source
from configs.blocks.sync import Sync
from configs.blocks.training import Train
from plugins.kinds import find
from plugins.parameters import checked

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]


class Run(Block):
    """The folder of a run, and what makes the run repeatable."""

    name: str = Field("run", min_length=1, description="Name of the run; its directory is <dir>/<name>.")
    dir: str = Field("runs", min_length=1, description="Folder that holds run directories.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of data order, initialisation and (when seeded) sampling.")

    @field_validator("name")
    @classmethod
    def _one_folder(cls, name: str) -> str:
        if name in (".", "..") or "/" in name or "\\" in name:
            raise ValueError("names one folder inside run.dir: no slashes (put the folders above it in run.dir)")
        return name


class Model(Block):
    """The policy."""

    path: str = Field(min_length=1, description="Folder in Hugging Face format, or a hub name.")
    dtype: Dtype = Field("bfloat16", description="Compute type of trainer and engine; master weights are float32.")
    device: Device = Field("auto", description="Where trainer and engine run; auto takes CUDA when there is any.")
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more time."
    )
    float32_head: bool = Field(
        False, description="Last matrix product in float32 in the trainer (ScaleRL, arXiv 2510.13786)."
    )
    trust_remote_code: bool = Field(False, description="Allow model code shipped with the checkpoint to run.")

    def located(self) -> Model:
        """Return the same model by its absolute path, for other processes."""
        return self.model_copy(update={"path": located(self.path)})


class Data(Block):
    """The prompts: training prompts, and held-out prompts that share nothing with them."""

    sources: list[Source] = Field(min_length=1, description="Training prompts, taken together.")
    heldout_sources: list[Source] = Field(
        default_factory=list, description="Held-out prompts; empty: a part of `sources` is split off."
    )
    heldout_fraction: float = Field(
        0.2, gt=0, lt=1, description="Share of split keys held out when heldout_sources is empty."
    )
    split_by: Literal["row", "prompt", "unordered_numbers"] = Field(
        "prompt",
        description="What must not be on both sides of the split: the row, the prompt's text, or the multiset of "
        "numbers in it (2+7 and 7+2 are twins).",
    )
    split_seed: int = Field(
        0,
        ge=0,
        description="Seed of generated rows and of the split; kept apart from run.seed so that all seeds are judged on "
        "the same held-out set.",
    )
    retire_pass_rate: float | None = Field(
        None,
        gt=0,
        le=1,
        description="A prompt whose last responses passed at least this often is not asked again, until fewer than a step's "
        "prompts are left (ScaleRL: 0.9). Empty: prompts never retire.",
    )
    system_prompt: str | None = Field(None, description="System message put before every prompt.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer prompts are left out and counted.")


class Algorithm(Block):
    """The method. `name` picks it, every other key is one of that method's own parameters (listed below per method)."""

    name: str = Field(min_length=1, description="A file in algs/ (`grpo`) or your own class (`my_lab.my_loss:Mine`).")
    params: dict[str, Any] = Field(
        default_factory=dict, description="The method's parameters, defaults filled in; in YAML they stand beside name."
    )

    @model_validator(mode="before")
    @classmethod
    def _own_params(cls, block: Any) -> Any:
        if not isinstance(block, dict):
            return block
        if not isinstance(block.get("name"), str):
            return {
                key: value for key, value in block.items() if key == "name"
            }  # without it no other key has a meaning
        name, others = block["name"], {key: value for key, value in block.items() if key != "name"}
        try:
            return {"name": name, "params": checked("method", name, others)}
        except ValidationError:
            raise
        except ValueError as error:
            raise error_at("name", str(error), name) from error

    def make_method(self) -> Any:
        """Return the method (an algs.method.PolicyMethod) with its parameters."""
        method = find("method", self.name)
        return method(method.Params(**self.params))

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        return {"name": self.name, **self.params}


class RewardPart(Named):
    """One part of the reward: a file in rewards/ (`last_number`), or your own. The reward is their weighted sum."""

    kind = "reward"
    weight: float = Field(1.0, description="Weight of this part in the sum.")


class Reward(Block):
    """How responses are scored: in separate processes, which are killed at a time-out."""

    parts: list[RewardPart] = Field(min_length=1, description="Parts of the reward.")
    workers: int = Field(1, ge=1, le=10_000, description="Scoring processes beside each engine.")
    concurrency: int = Field(
        16,
        ge=1,
        description="Responses that a scoring process works on at once when a part is an async function (a judge); "
        "without one it is one at a time.",
    )
    timeout_seconds: float = Field(
        10.0, gt=0, description="A score that takes longer is an error; its process is killed and replaced."
    )
    first_timeout_seconds: float = Field(
        120.0,
        gt=0,
        description="The same limit for the first score of a scoring process, which may load a model or data; "
        "timeout_seconds where that is longer.",
    )
    on_error: Literal["drop", "zero"] = Field(
        "drop",
        description="A response whose scoring failed, Inf and NaN included, leaves its group's baseline and the loss "
        "(drop) or is paid 0 (zero); both are counted.",
    )
    max_error_rate: float = Field(
        0.2, ge=0, le=1, description="The run stops when more than this share of a step's responses failed to score."
    )
    pass_threshold: float = Field(
        0.5, description="A response whose reward is at least this counts as passed (pass rate)."
    )


class Rollout(Block):
    """How responses are sampled."""

    prompts_per_step: int = Field(16, ge=1, le=1_000_000, description="Prompts asked per step.")
    responses_per_prompt: int = Field(
        8, ge=1, le=1_000_000, description="Responses sampled per prompt: the group size."
    )
    max_new_tokens: int = Field(512, ge=1, description="A response is cut at this length and counts as truncated.")
    temperature: float = Field(
        1.0, gt=0, le=5, description="Sampling temperature; the trainer's log-probabilities are taken at the same."
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling; below 1 the sampled distribution is not the trained one (warned about).",
    )
    top_k: int = Field(
        0, ge=0, description="Sample among the k likeliest tokens; 0: all of them (above 0 is warned about)."
    )
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="Strings that end a response."
    )
    seeded: bool = Field(
        True,
        description="Give each request a seed made of (run seed, step, prompt, sample): repeatable whatever the order. "
        "Costs about 4 % of the generation rate on a CPU; not measured on GPUs.",
    )
    engines: int = Field(1, ge=1, le=10_000, description="vLLM engines, each an actor of its own.")
    tensor_parallel_size: int = Field(1, ge=1, le=10_000, description="Devices per engine.")
    environment: str = Field(
        "single_turn", description="A file in rollouts/environments or a dotted path (module:Class)."
    )
    filters: list[Filter] = Field(
        default_factory=list,
        description="Which responses are trained on, in order: files in rollouts/filters or your own.",
    )
    max_refill_rounds: int = Field(
        3,
        ge=0,
        description="In place of groups that a refilling filter left out, at most this many times prompts_per_step further "
        "prompts are asked in a step; after that it trains on fewer, and says so (rollout/unfilled_groups).",
    )
    engine: dict[str, Any] = Field(
        default_factory=dict, description="Passed to vLLM as it is, e.g. {gpu_memory_utilization: 0.5}."
    )


class Eval(Block):
    """Held-out evaluation: before, during and after."""

    every: int = Field(10, ge=0, description="Steps between evaluations; 0: only before and after.")
    max_prompts: int = Field(200, ge=1, description="Held-out prompts used.")
    samples_per_prompt: int = Field(
        1, ge=1, description="Responses per prompt; 1 with temperature 0 is greedy accuracy."
    )
    temperature: float = Field(0.0, ge=0, le=5, description="0: greedy.")
    max_new_tokens: int | None = Field(None, ge=1, description="Empty: as in rollout.")


class Checkpoint(Block):
    """Which weights of the policy are kept."""

    every: int | None = Field(
        None,
        ge=0,
        description="Steps between checkpoints; 0: only at the end. Empty: a tenth of the run's steps, but at least 10, so that "
        "little is lost by whatever ends a run, and little time is spent on it.",
    )
    keep: int = Field(2, ge=1, description="Checkpoints kept; older ones that this run made are removed.")
    resume_state: bool = Field(
        True,
        description="Keep beside the newest two checkpoints what --resume needs: optimizer state and float32 weights, 12 to 16 bytes a "
        "trained parameter. Without it a checkpoint is the weights alone.",
    )
    grace_seconds: float = Field(
        60.0,
        ge=0,
        description="On Ctrl-C or SIGTERM, the step under way (in RL: the trainer's part of it) is finished and a checkpoint "
        "written; a run that takes longer for it, or gets a second signal, ends without. 0: end at once.",
    )
    merged: bool = Field(
        False,
        description="With lora: write the model that base and adapter make, and the adapter in its folder adapter/; "
        "otherwise the adapter alone.",
    )

    def period(self, steps: int) -> int:
        """Return how many steps lie between the checkpoints of a run of so many steps; 0: none before its end."""
        return max(10, -(-steps // 10)) if self.every is None else self.every


class RLConfig(Block):
    """A reinforcement learning job (main_rl.py)."""

    run: Run = Field(default_factory=Run)
    model: Model
    data: Data
    algorithm: Algorithm
    objective: Objective = Field(default_factory=Objective)
    critic: Critic = Field(default_factory=Critic)
    lora: Lora | None = Field(None, description="Train low-rank adapters only; empty: every weight is trained.")
    rollout: Rollout = Field(default_factory=Rollout)
    reward: Reward
    train: Train = Field(default_factory=Train)
    schedule: Schedule = Field(default_factory=Schedule)
    failures: Failures = Field(default_factory=Failures)
    placement: Placement = Field(default_factory=Placement)
    sync: Sync = Field(default_factory=Sync)
    eval: Eval = Field(default_factory=Eval)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    capture: Capture = Field(default_factory=Capture)

    @property
    def colocate(self) -> bool | None:
        """Return placement.colocate (None: "when devices are few"), or False when both sides work at the same time."""
        in_turn = self.schedule.mode == "sync" or self.schedule.pause_while_training
        return self.placement.colocate if in_turn else False
