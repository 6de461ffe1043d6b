import errno
import os

import pytest

from megaspec.core.regular_files import open_inside, open_regular, read_inside

WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def test_a_regular_file_is_made_written_and_read(tmp_path):
    with open(open_inside(tmp_path, "a.txt", WRITE), "wb") as file:
        file.write(b"longer than the next")
    with open(open_inside(tmp_path, "a.txt", WRITE), "wb") as file:
        file.write(b"short")
    assert read_inside(tmp_path, "a.txt", limit=5) == b"short"


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "real" / "logs").mkdir(parents=True)
    (tmp_path / "real" / "logs" / "a").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    assert read_inside(tmp_path / "link", "logs/a", limit=10) == b"x"


@pytest.mark.parametrize("flags", [os.O_RDONLY, WRITE, os.O_RDWR | os.O_APPEND | os.O_CREAT])
@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "device", "folder", "link on the way"])
def test_what_is_no_plain_file_is_refused_and_left_as_it_was(tmp_path, kind, flags):
    (tmp_path / "run").mkdir()
    (tmp_path / "home").mkdir()
    victim = tmp_path / "home" / "notes"
    victim.write_bytes(b"precious")
    place = tmp_path / "run" / "notes"
    name = "notes"
    if kind == "link":
        place.symlink_to(victim)
    elif kind == "dangling link":
        place.symlink_to(tmp_path / "home" / "new")
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    elif kind == "folder":
        place.mkdir()
    else:
        (tmp_path / "run" / "logs").symlink_to(tmp_path / "home")
        name = "logs/notes"
    with pytest.raises(OSError, match=r"link|regular|folder") as caught:
        os.close(open_inside(tmp_path / "run", name, flags))
    assert caught.value.filename == str(tmp_path / "run" / name)
    assert victim.read_bytes() == b"precious"
    assert sorted(f.name for f in (tmp_path / "home").iterdir()) == ["notes"]


def test_a_device_is_refused_without_a_link_in_between():
    with pytest.raises(OSError, match="no regular file"):
        open_regular("/dev/zero")


@pytest.mark.parametrize("name", ["/etc/hostname", "../a", "a/../../b", ""])
def test_a_name_that_leads_out_is_refused(tmp_path, name):
    with pytest.raises(OSError, match="inside its folder") as caught:
        open_inside(tmp_path, name)
    assert caught.value.errno == errno.EINVAL


def test_a_file_over_the_limit_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"123456")
    with pytest.raises(OSError, match="more than 5 bytes"):
        read_inside(tmp_path, "a", limit=5)
