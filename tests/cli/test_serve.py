"""Tests of `arealite.cli.serve`: a wrong setting or a damaged model folder is one clear error message."""

from __future__ import annotations

import json
import os
import shutil
import socket

import pytest
from safetensors.torch import load_file, save_file

from arealite.api.errors import AReaLiteError
from arealite.cli import serve
from tests import warm_python


def test_startup_errors_name_the_setting(model_path, tmp_path):
    torn = shutil.copytree(model_path, tmp_path / "torn")
    os.truncate(torn / "model.safetensors", 2000)
    incomplete = shutil.copytree(model_path, tmp_path / "incomplete")
    weights = load_file(incomplete / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, incomplete / "model.safetensors", metadata={"format": "pt"})
    no_tokenizer = shutil.copytree(model_path, tmp_path / "no_tokenizer")
    (no_tokenizer / "tokenizer.json").write_text("{")

    def with_settings(**changes) -> str:
        folder = shutil.copytree(model_path, tmp_path / "-".join(changes))
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | changes))
        return f"model_path={folder}"

    rope = {"rope_type": "spiral", "rope_theta": 1e4}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        model = f"model_path={model_path}"
        cases = [
            ([model, f"port={port}"], str(port)),
            (["model_path=/nowhere"], "/nowhere"),
            ([f"model_path={torn}"], "damaged or incomplete"),
            ([f"model_path={incomplete}"], "model.layers.1.mlp.up_proj.weight"),
            ([f"model_path={no_tokenizer}"], "tokenizer"),
            ([with_settings(num_attention_heads="x")], "num_attention_heads"),
            ([with_settings(rope_parameters=rope)], "spiral"),
            ([with_settings(max_position_embeddings=1)], "max_position_embeddings"),
            (["model_pth=x"], "model_path"),
            ([model, "host=0.0.0.0"], "api_key"),
            ([model, "context_length=99999"], "context_length"),
            ([model, "max_total_tokens=3"], "max_total_tokens"),
            ([model, "max_prefill_tokens=0"], "max_prefill_tokens"),
            ([model, "port=70000"], "port"),
            ([model, "device=tpu"], "device"),
        ]
        for arguments, message in cases:
            with pytest.raises(AReaLiteError, match=message):
                serve.main(arguments)


def test_startup_error_is_one_line_and_exit_code_2():
    process = warm_python.run(["-m", "arealite.cli.serve", "device=cpu", "model_path=/nowhere"], timeout=60)
    errors = process.stderr
    assert process.returncode == 2
    assert errors.strip().splitlines()[-1].startswith("error: ") and "Traceback" not in errors
