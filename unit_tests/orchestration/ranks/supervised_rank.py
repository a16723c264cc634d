"""Supervised jobs of test_supervised.py on one rank; see ranks.py."""

from pathlib import Path


def run(folder: str, rank: int, ranks: int) -> None:
    from configs.blocks.supervised import SLConfig
    from configs.reading.load import load, run_directory, to_yaml
    from eval.report import write_report
    from orchestration.run.directory import RunDirectory
    from orchestration.start.load_data import load_examples
    from orchestration.supervised.loop import run_sl

    for file in sorted(Path(folder).glob("*.yaml")):
        config = load(file, SLConfig, run_dir=f"{folder}/runs_{ranks}/{file.stem}")
        path = run_directory(config)
        made = RunDirectory.create(path, to_yaml(config)) if rank == 0 else RunDirectory.made_by_first_rank(path)
        run_sl(config, load_examples(config), made, write_report)
