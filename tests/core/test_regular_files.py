import errno
import os
import socket

import pytest

from megaspec.core.errors import WriteError
from megaspec.core.regular_files import (
    check_kinds,
    disk_failures_told,
    make_folder_inside,
    open_inside,
    open_regular,
    read_inside,
    write_beside,
)

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
@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "socket", "device", "folder", "link on the way"])
def test_what_is_no_plain_file_is_refused_and_left_as_it_was(tmp_path, kind, flags, monkeypatch):
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
    elif kind == "socket":
        # its path is too long for an address
        monkeypatch.chdir(place.parent)
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(place.name)
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


def test_a_folder_is_made_where_it_is_not_there(tmp_path):
    make_folder_inside(tmp_path, "logs")
    make_folder_inside(tmp_path, "logs")
    make_folder_inside(tmp_path, "logs/more")
    assert (tmp_path / "logs" / "more").is_dir()
    with pytest.raises(OSError, match="inside its folder"):
        make_folder_inside(tmp_path, "../logs")


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "file", "link on the way"])
def test_a_folder_is_not_made_through_a_link(tmp_path, kind):
    run, home = tmp_path / "run", tmp_path / "home"
    run.mkdir()
    home.mkdir()
    name = "logs"
    if kind == "link":
        (run / "logs").symlink_to(home)
    elif kind == "dangling link":
        (run / "logs").symlink_to(home / "new")
    elif kind == "fifo":
        os.mkfifo(run / "logs")
    elif kind == "file":
        (run / "logs").write_bytes(b"")
    else:
        (run / "on").symlink_to(home)
        name = "on/logs"
    with pytest.raises(OSError, match=r"link|is no folder") as caught:
        make_folder_inside(run, name)
    assert caught.value.filename == str(run / name)
    assert not list(home.iterdir())


@pytest.mark.parametrize("code", [errno.ENXIO, errno.ENODEV], ids=errno.errorcode.get)
def test_a_regular_file_whose_device_is_gone_is_not_taken_for_another_kind(tmp_path, monkeypatch, code):
    (tmp_path / "a").write_bytes(b"x")

    def gone(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", gone)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        open_regular(tmp_path / "a")
    assert caught.value.errno == code
    # nor where nothing is known of it any more
    monkeypatch.setattr(os, "stat", gone)
    with pytest.raises(OSError, match=os.strerror(code)):
        open_regular(tmp_path / "a")


@pytest.mark.parametrize("code", [errno.ENXIO, errno.ENODEV], ids=errno.errorcode.get)
def test_a_device_that_nothing_drives_is_no_regular_file(tmp_path, monkeypatch, code):
    # in its place: only root may make a device
    os.mkfifo(tmp_path / "a")

    def undriven(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", undriven)
    with pytest.raises(OSError, match="is no regular file") as caught:
        open_regular(tmp_path / "a")
    assert caught.value.errno == errno.EINVAL


def test_kinds_are_checked_of_what_is_there(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder link").symlink_to("folder")
    os.mkfifo(tmp_path / "fifo")
    check_kinds(tmp_path, files=("file", "none", "none/x"), folders=("folder", "none"))
    for wrong in ({"files": ["folder"]}, {"files": ["link"]}, {"files": ["fifo"]}):
        with pytest.raises(OSError, match=r"is no regular file|is a link") as caught:
            check_kinds(tmp_path, **wrong)
        assert caught.value.filename == str(tmp_path / wrong["files"][0])
    for name in ("file", "fifo", "folder link"):
        with pytest.raises(OSError, match=r"is no folder|is a link"):
            check_kinds(tmp_path, folders=[name])


def test_a_file_beside_is_whole_or_not_there(tmp_path):
    old = os.umask(0o027)
    try:
        made = write_beside(tmp_path / "a", [b"one ", b"two"])
    finally:
        os.umask(old)
    assert made.parent == tmp_path
    assert made.read_bytes() == b"one two"
    assert made.stat().st_mode & 0o777 == 0o640
    assert write_beside(tmp_path / "a", []) != made

    def chunks():
        yield b"one"
        raise OSError(errno.ENOSPC, "full")

    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="full"):
        write_beside(tmp_path / "a", chunks())
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("code", "name", "is_told"),
    [
        (errno.EIO, None, True),
        (errno.ESTALE, "a", True),
        (errno.EREMOTEIO, "a", True),
        (errno.ETIMEDOUT, "a", True),
        (errno.ENXIO, "a", True),
        (errno.ENODEV, "a", True),
        (errno.ENOTCONN, "a", True),
        # of a socket
        (errno.ETIMEDOUT, None, False),
        (errno.ENXIO, None, False),
        (errno.ENOENT, "a", False),
    ],
)
def test_errors_of_disks_and_file_servers_end_as_what_can_not_be_written(code, name, is_told):
    error = OSError(code, os.strerror(code), name)
    with pytest.raises(WriteError if is_told else OSError) as caught, disk_failures_told():
        raise error
    if is_told:
        assert os.strerror(code) in str(caught.value)
        assert caught.value.__cause__ is error
    else:
        assert caught.value is error
