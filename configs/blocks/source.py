"""The block of one data source: where its rows are, and what its columns mean."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from configs.blocks.block import Block

FILE_ENDINGS = (".parquet", ".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")


class Source(Block):
    """One source of rows: a reasoning_gym task, a file, or a Hugging Face data set. Exactly one of `reasoning_gym`,
    `file` and `dataset` must be given. The columns that are read depend on what the method learns from."""

    reasoning_gym: str | None = Field(None, description="Name of a reasoning_gym generator, e.g. chain_sum.")
    params: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the generator, e.g. {min_terms: 2, max_terms: 2}."
    )
    size: int = Field(1000, ge=1, description="Rows to generate (before duplicates are removed).")
    file: str | None = Field(
        None,
        description="A .parquet, .jsonl, .ndjson or .json file of rows (JSON: an object per line; may be .gz as well).",
    )
    dataset: str | None = Field(
        None,
        description="A Hugging Face data set: a folder that save_to_disk wrote, a folder of data files, or a hub name.",
    )
    split: str = Field("train", min_length=1, description="Split of `dataset`.")
    subset: str | None = Field(None, description="Configuration of `dataset`, where it has several.")
    revision: str | None = Field(None, description="Commit, tag or branch of a hub name in `dataset`.")
    prompt_column: str = Field("prompt", description="Column with the question: text, or a list of chat messages.")
    answer_column: str | None = Field(
        "answer",
        description="Column with the expected answer (demonstrations: the text to learn); null: the rows have none.",
    )
    messages_column: str | None = Field(
        None, description="Demonstrations as whole chats: column with the messages, in place of prompt and answer."
    )
    chosen_column: str = Field(
        "chosen",
        description="Pairs: the preferred response, as text, as messages that continue the prompt, or as a whole chat.",
    )
    rejected_column: str = Field("rejected", description="Pairs: the other response, in the same form.")
    response_column: str = Field("response", description="Labelled responses: the response, in the same forms.")
    label_column: str = Field("label", description="Labelled responses: true where the response is desirable.")
    weight: float = Field(1.0, gt=0, description="Share of this source in a mixture, relative to the other sources'.")

    @model_validator(mode="after")
    def _one_kind(self) -> Source:
        named = [key for key in ("reasoning_gym", "file", "dataset") if getattr(self, key) is not None]
        if len(named) != 1:
            raise ValueError("a data source names exactly one of 'reasoning_gym', 'file' and 'dataset'")
        if self.file is not None and not self.file.lower().endswith(FILE_ENDINGS):
            raise ValueError(
                f"'file' must end in .parquet, .jsonl, .ndjson or .json (JSON also .gz); given {self.file!r}"
            )
        if self.reasoning_gym is None and self.params:
            raise ValueError(f"'params' are arguments of a reasoning_gym generator; a {named[0]} has none")
        if self.dataset is None:
            for key, default in (("split", "train"), ("subset", None), ("revision", None)):
                if getattr(self, key) != default:
                    raise ValueError(f"'{key}' belongs to 'dataset'; a {named[0]} has none")
        return self
