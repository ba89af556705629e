"""The recorder keeps the environments of the newest attempts only."""

from arealite.core.record.recorder import Recorder


def test_files_of_attempts_are_bounded(tmp_path):
    for number in range(25):
        recorder = Recorder(tmp_path, 1 << 20, 1)
        recorder.begin(1, {"number": number})
        recorder.close()
    found = sorted(int(path.read_text().split(":")[1].strip("}")) for path in tmp_path.glob("attempt*.json"))
    assert found == list(range(5, 25))
