"""`arealite plan` and `arealite doctor`."""

import pytest

from arealite.api.errors import AllocationError, ConfigError
from arealite.cli import doctor, plan


def test_plan_prints_where_everything_goes(tmp_path, capsys):
    script = tmp_path / "s.py"
    script.write_text("")
    base = ["actor.path=m", "cluster.n_nodes=4", "cluster.n_gpus_per_node=4"]
    assert plan.main([str(script), "allocation_mode=sglang.d12p1t1+d4p1t1", *base]) == 0
    out = capsys.readouterr().out
    assert "12 servers, 4 trainer ranks" in out and "rank 3: node 3 gpu 3" in out
    with pytest.raises(AllocationError, match="needs 32 devices"):
        plan.main([str(script), "allocation_mode=sglang.d16p1t1+d16p1t1", *base])
    with pytest.raises(ConfigError, match="name the script first"):
        plan.main(["actor.path=m"])


def test_doctor_finds_this_machine_fit(tmp_path, capsys, monkeypatch):
    with pytest.raises(ConfigError, match="there is no folder"):
        doctor.main([str(tmp_path / "not" / "there")])
    assert doctor.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "is not a run directory" in out and "torch 2." in out and "GB free" in out and "ray" in out
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "2.4.0")
    assert doctor.main([]) == 1
    assert "2.11 or later is needed" in capsys.readouterr().out


def test_doctor_finds_a_torch_that_cannot_be_imported(capsys, monkeypatch):
    def fail(name):
        raise OSError("libcudart.so.13 is missing")

    monkeypatch.setattr(doctor.importlib, "import_module", fail)
    assert doctor.main([]) == 1
    assert "torch cannot be imported: libcudart.so.13" in capsys.readouterr().out
