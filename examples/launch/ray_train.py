"""Train examples/train.py's model with Ray Train: Ray starts the ranks, on one machine or on a cluster.

    python examples/launch/ray_train.py --workers 4                  # 4 CPU ranks
    python examples/launch/ray_train.py --workers 16 --gpu --storage /shared/ray   # 16 GPUs of a Ray cluster

Ray makes the process group itself, so `main()` of train.py is not used and `train()` is, unchanged.
"""

import argparse
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device

EXAMPLES = Path(__file__).resolve().parents[1]


def train_on_worker(config: dict) -> None:
    """Runs in every rank, in the process group that Ray has made."""
    from train import train  # found there because of working_dir

    train(get_device(), config["steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="ranks in all")
    parser.add_argument("--gpu", action="store_true", help="one GPU a rank; default: CPUs")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--storage", help="folder for results; with several hosts one that all of them see")
    options = parser.parse_args()

    ray.init(runtime_env={"working_dir": str(EXAMPLES)})  # joins a running cluster if RAY_ADDRESS names one
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"steps": options.steps},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(storage_path=options.storage),
    )
    trainer.fit()  # raises what a rank raised


if __name__ == "__main__":
    main()
