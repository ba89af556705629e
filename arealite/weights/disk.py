"""Weights on disk: a Hugging Face folder, or a PEFT folder with a LoRA adapter, for each version.

Works for every server that sees the trainer's file system. A version that a server may still read is never changed.
"""

import shutil
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.utils import distributed
from arealite.weights.files import opened, read_json, safetensors_header, unreadable
from arealite.weights.layout import TensorLayout
from arealite.weights.transport import T, Transport, WeightClient, WeightOwner, Weights

MODEL_STEM, ADAPTER_STEM = "model", "adapter_model"


class DiskTransport(Transport):
    """Publishes each version in a folder of its own, `{path}/v{version}`."""

    def publish(self, owner: WeightOwner, meta: WeightUpdateMeta) -> None:
        owner.save_weights(meta.path, adapter_only=meta.is_adapter)

    def versioned(self, meta: WeightUpdateMeta) -> WeightUpdateMeta:
        return replace(meta, path=str(Path(meta.path) / f"v{meta.version}"))

    def remove_old(self, published: WeightUpdateMeta) -> None:
        if distributed.rank() == 0:
            for folder in Path(published.path).parent.glob("v*"):
                if folder != Path(published.path):
                    shutil.rmtree(folder, ignore_errors=True)

    def open(self, meta: WeightUpdateMeta) -> Weights:
        return read_tensors(Path(meta.path), ADAPTER_STEM if meta.is_adapter else MODEL_STEM)

    async def _load(self, client: WeightClient[T], server: T, meta: WeightUpdateMeta) -> None:
        if meta.is_adapter:
            await client.load_adapter(server, meta)
        else:
            await client.load_folder(server, meta)


def read_tensors(folder: Path, stem: str) -> Weights:
    """Read all tensors of `{stem}.safetensors` or, without that file, of the files that its index names."""
    index = folder / f"{stem}.safetensors.index.json"
    weights: Weights = {}
    try:
        if not folder.is_dir():
            raise WeightUpdateError(f"{folder} is not a folder: give the path of saved weights")
        names = [f"{stem}.safetensors"]
        if index.exists() and not (folder / names[0]).exists():
            names = sorted(set(read_json(index)["weight_map"].values()))
        for name in names:
            if Path(name).name != name:
                raise WeightUpdateError(f"{index} names files outside its folder")
            weights.update(_read_file(folder / name))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise unreadable(folder, error) from error
    return weights


def _read_file(path: Path) -> Weights:
    """Map one file, if it is as long as its header says.

    Reading a mapping beyond the end of its file would kill the process.
    """
    with opened(path) as descriptor:
        TensorLayout.from_safetensors(*safetensors_header(descriptor))
        # The file that was checked, whatever the path names by now.
        with safe_open(f"/proc/self/fd/{descriptor}", framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
