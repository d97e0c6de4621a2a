"""Guards files on their way: only what is missing is sent, whatever breaks, and nothing unchecked takes a name."""

from __future__ import annotations

from pathlib import Path

import pytest
from gym_sdk_fakes.daemon import KEY, Daemon
from gym_sdk_fakes.refusal import CUT, Code, Refusal

from gym_sdk.client import Gym
from gym_sdk.client.errors import InvalidRequest, NotFound, ServerFault
from gym_sdk.client.types import FilePurpose


def test_a_file_is_sent_checked_and_fetched(gym: Gym, daemon: Daemon, tmp_path: Path) -> None:
    daemon.max_chunk_bytes = 1000
    content = bytes(range(256)) * 20
    (tmp_path / "rows.jsonl").write_bytes(content)
    seen: list[tuple[int, int]] = []
    file = gym.files.upload(tmp_path / "rows.jsonl", on_progress=lambda done, total: seen.append((done, total)))
    assert (file.filename, file.size_bytes, file.purpose) == ("rows.jsonl", 5120, FilePurpose.DATASET)
    assert file.dataset is not None
    assert seen == [(done, 5120) for done in (0, 1000, 2000, 3000, 4000, 5000, 5120)]
    assert daemon.contents[file.id] == content

    target = gym.files.download(file.id, tmp_path / "back")
    assert target.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "rows.jsonl"]


def test_content_that_is_there_is_not_sent_again(gym: Gym, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "b").write_bytes(b"x" * 100)
    assert gym.files.upload(tmp_path / "a").id == gym.files.upload(tmp_path / "b").id
    assert daemon.count("UploadChunk") == 1


def test_an_upload_goes_on_where_an_earlier_process_was_cut_off(base_url: str, daemon: Daemon, tmp_path: Path) -> None:
    daemon.max_chunk_bytes = 1000
    (tmp_path / "a").write_bytes(bytes(range(250)) * 40)
    dead = Refusal(Code.INTERNAL, message="gone")
    with Gym(base_url, api_key=KEY) as gym:

        def stop_at_six(done: int, total: int) -> None:
            if done >= 6000:
                daemon.fail("UploadChunk", dead)

        with pytest.raises(ServerFault):
            gym.files.upload(tmp_path / "a", on_progress=stop_at_six)
    sent_before = daemon.count("UploadChunk")
    daemon.faults.clear()
    with Gym(base_url, api_key=KEY) as gym:
        file = gym.files.upload(tmp_path / "a")
    assert daemon.contents[file.id] == (tmp_path / "a").read_bytes()
    assert sent_before == 7
    assert daemon.count("UploadChunk") - sent_before == 4


def test_a_lost_answer_to_a_chunk_doubles_no_byte(gym: Gym, daemon: Daemon, tmp_path: Path) -> None:
    daemon.max_chunk_bytes = 1000
    (tmp_path / "a").write_bytes(bytes(range(250)) * 12)
    daemon.fail("UploadChunk", CUT, after_messages=1, times=2)
    file = gym.files.upload(tmp_path / "a")
    assert daemon.contents[file.id] == (tmp_path / "a").read_bytes()


def test_an_upload_whose_file_was_deleted_begins_again(gym: Gym, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    gym.files.delete(gym.files.upload(tmp_path / "a").id)
    file = gym.files.upload(tmp_path / "a")
    assert daemon.contents[file.id] == b"x" * 100


def test_a_broken_dataset_is_told_row_by_row(gym: Gym, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"BROKEN\n")
    with pytest.raises(InvalidRequest) as caught:
        gym.files.upload(tmp_path / "rows.jsonl")
    assert caught.value.reason == "DATASET_INVALID"
    assert [(each.field, each.description) for each in caught.value.violations] == [("rows.jsonl:1", "not JSON")]


def test_a_download_goes_on_after_each_break(gym: Gym, daemon: Daemon, tmp_path: Path) -> None:
    file = daemon.add_file(bytes(range(256)) * 40)
    daemon.fail("DownloadFile", CUT, times=3, after_messages=3)
    target = gym.files.download(file.id, tmp_path / "got")
    assert target.read_bytes() == daemon.contents[file.id]
    offsets = [request.offset_bytes for request in daemon.requests if hasattr(request, "offset_bytes")]
    assert offsets == [0, 2000, 4000, 6000]


def test_a_download_goes_on_where_an_earlier_process_was_cut_off(base_url: str, daemon: Daemon, tmp_path: Path) -> None:
    file = daemon.add_file(bytes(range(256)) * 40)
    daemon.fail("DownloadFile", Refusal(Code.INTERNAL, message="gone"), after_messages=5)
    with Gym(base_url, api_key=KEY) as gym, pytest.raises(ServerFault):
        gym.files.download(file.id, tmp_path / "got")
    assert not (tmp_path / "got").exists()
    with Gym(base_url, api_key=KEY) as gym:
        gym.files.download(file.id, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == daemon.contents[file.id]
    assert [request.offset_bytes for request in daemon.requests if hasattr(request, "offset_bytes")] == [0, 4000]


def test_a_download_with_another_sha256_leaves_nothing(gym: Gym, daemon: Daemon, tmp_path: Path) -> None:
    file = daemon.add_file(b"a" * 3000)
    daemon.contents[file.id] = b"b" * 3000
    with pytest.raises(ServerFault, match="another sha256"):
        gym.files.download(file.id, tmp_path / "got")
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_is_right_already_is_not_fetched(gym: Gym, daemon: Daemon, tmp_path: Path) -> None:
    file = daemon.add_file(b"a" * 3000)
    (tmp_path / "got").write_bytes(b"a" * 3000)
    gym.files.download(file.id, tmp_path / "got")
    assert daemon.count("DownloadFile") == 0


def test_a_download_into_a_folder_takes_only_the_last_part_of_the_name(
    gym: Gym, daemon: Daemon, tmp_path: Path
) -> None:
    for name in ("../../etc/passwd", "..\\..\\passwd"):
        file = daemon.add_file(name.encode(), filename=name)
        assert gym.files.download(file.id, tmp_path) == tmp_path / "passwd"


def test_lists_go_over_pages(gym: Gym, daemon: Daemon) -> None:
    for number in range(5):
        daemon.add_file(str(number).encode())
    assert [file.id for file in gym.files.list()] == ["file-5", "file-4", "file-3", "file-2", "file-1"]
    assert daemon.count("ListFiles") == 3
    assert [file.id for file in gym.files.list(limit=1)] == ["file-5"]
    assert daemon.count("ListFiles") == 4
    assert list(gym.files.list(purpose="adapter")) == []


def test_the_adapter_is_fetched_whole(gym: Gym, daemon: Daemon, spec_path: Path, tmp_path: Path) -> None:
    job = gym.jobs.create(spec_path)
    with pytest.raises(NotFound, match="has made no adapter\nhint: it has made: nothing yet"):
        job.adapter.download(tmp_path / "adapter")
    contents = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(5000), "more/tokenizer.json": b"[]"}
    daemon.add_artifact(job.id, contents)
    seen: list[int] = []
    folder = job.adapter.download(tmp_path / "adapter", on_progress=lambda done, total: seen.append(done))
    assert {path: (folder / path).read_bytes() for path in contents} == contents
    assert seen == sorted(seen)
    assert seen[-1] == 5004


@pytest.mark.parametrize(
    "path", ["../evil", "/etc/passwd", "a/../../b", "C:\\x", "c:x", "a\\b", "", "a//b", "x\0y", "."]
)
def test_a_daemon_cannot_write_outside_of_the_folder(
    gym: Gym, daemon: Daemon, spec_path: Path, tmp_path: Path, path: str
) -> None:
    job = gym.jobs.create(spec_path)
    daemon.add_artifact(job.id, {"fine": b"1", path: b"2"})
    with pytest.raises(ServerFault, match="no safe path"):
        job.adapter.download(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
