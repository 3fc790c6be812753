"""The trainer's side of vLLM's `nccl` weight transfer, run by a Python that has vLLM and a GPU. Imports none of ours.

Takes its settings as one JSON argument; then a JSON line {"folder", "version"} per update on standard input, each
answered by {} or {"error"} on standard output. Written by vLLM 0.32's documentation; untested for want of GPUs.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Standard output belongs to the answers; vLLM logs to it from its import on, so what others print is turned elsewhere.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # type: ignore  # noqa: E402
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource  # type: ignore  # noqa: E402
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient  # type: ignore  # noqa: E402
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo  # type: ignore  # noqa: E402


class FolderSource(WeightSource):  # type: ignore[misc]
    """The tensors of the folder that `folder` names at the time."""

    folder = ""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._tensors("cuda:0")

    def _tensors(self, device: str) -> Iterator[tuple[str, torch.Tensor]]:
        for file in sorted(Path(self.folder).glob("*.safetensors")):
            with safe_open(file, framework="pt", device=device) as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield name, tensors.get_tensor(name)

    def metadata(self) -> list[Any]:
        """See WeightSource. Read on the CPU, so that no second copy lies on the GPU."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors("cpu")]


class VersionedClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """Tells the server the version with every finished update."""

    version = ""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See VLLMWeightSyncClient."""
        super().finish_weight_update(weight_version or self.version)


def main() -> None:
    """Serve updates until standard input ends."""
    settings = json.loads(sys.argv[1])
    client = VersionedClient(settings["server"], timeout=settings["timeout_s"])
    source = FolderSource()
    trainer = None
    for line in sys.stdin:
        order = json.loads(line)
        source.folder, client.version = order["folder"], order["version"]
        try:
            if trainer is None:
                place = {name: settings[name] for name in ("master_address", "master_port", "world_size")}
                init = NCCLTrainerInitInfo(rank=0, **place)
                trainer = WeightTransferTrainerFactory.trainer_init(init, client=client, source=source)
            trainer.send_weights()
            answer = {}
        except Exception as error:  # the other side decides what a failed update means
            answer = {"error": repr(error)}
        print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
