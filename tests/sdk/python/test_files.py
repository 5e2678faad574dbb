"""The files API: content, directories, names, watching, signed URLs."""

import hashlib
import io
import os
import uuid

import httpx
import pytest
from e2b import FileType, FilesystemEventType
from e2b.exceptions import InvalidArgumentException, NotFoundException


@pytest.fixture
def folder(sandbox):
    path = f"/home/user/{uuid.uuid4().hex}"
    assert sandbox.files.make_dir(path) is True
    yield path
    sandbox.files.remove(path)


def test_text_and_bytes_round_trip(sandbox, folder):
    written = sandbox.files.write(f"{folder}/a.txt", "grüße 🙂\n")
    assert written.name == "a.txt" and written.path == f"{folder}/a.txt"
    assert sandbox.files.read(f"{folder}/a.txt") == "grüße 🙂\n"
    every_byte = bytes(range(256)) * 64
    sandbox.files.write(f"{folder}/b.bin", every_byte)
    assert bytes(sandbox.files.read(f"{folder}/b.bin", format="bytes")) == every_byte
    sandbox.files.write(f"{folder}/c.txt", "")
    assert sandbox.files.read(f"{folder}/c.txt") == ""


def test_write_replaces_and_makes_parents(sandbox, folder):
    sandbox.files.write(f"{folder}/x/y/z.txt", "long first version")
    sandbox.files.write(f"{folder}/x/y/z.txt", "short")
    assert sandbox.files.read(f"{folder}/x/y/z.txt") == "short"
    assert sandbox.commands.run(f"stat -c %U {folder}/x/y/z.txt {folder}/x").stdout == "user\nuser\n"


def test_several_files_in_one_request(sandbox, folder):
    written = sandbox.files.write_files(
        [{"path": f"{folder}/{n}.txt", "data": f"number {n}"} for n in range(10)]
    )
    assert [each.path for each in written] == [f"{folder}/{n}.txt" for n in range(10)]
    assert sandbox.files.read(f"{folder}/7.txt") == "number 7"


def test_relative_paths_are_those_of_the_user(sandbox):
    sandbox.files.write("relative.txt", "here")
    assert sandbox.files.read("/home/user/relative.txt") == "here"
    sandbox.files.write("relative.txt", "root's", user="root")
    assert sandbox.files.read("/root/relative.txt", user="root") == "root's"
    assert sandbox.files.read("relative.txt") == "here"


def test_a_large_file_arrives_whole_both_ways(sandbox, folder):
    content = os.urandom(1 << 20) * 16
    sandbox.files.write(f"{folder}/large", io.BytesIO(content))
    digest = sandbox.commands.run(f"sha256sum {folder}/large").stdout.split()[0]
    assert digest == hashlib.sha256(content).hexdigest()
    back = hashlib.sha256()
    size = 0
    for chunk in sandbox.files.read(f"{folder}/large", format="stream"):
        back.update(chunk)
        size += len(chunk)
    assert (size, back.hexdigest()) == (len(content), digest)


def test_list_tells_files_directories_and_links(sandbox, folder):
    sandbox.files.write(f"{folder}/file", "12345")
    sandbox.files.make_dir(f"{folder}/dir")
    sandbox.files.write(f"{folder}/dir/deep", "")
    sandbox.commands.run("ln -s file link; chmod 640 file", cwd=folder)
    entries = {each.name: each for each in sandbox.files.list(folder)}
    assert set(entries) == {"file", "dir", "link"}
    assert entries["file"].type == FileType.FILE and entries["dir"].type == FileType.DIR
    assert entries["file"].size == 5 and entries["file"].mode & 0o777 == 0o640
    assert entries["file"].owner == "user" and entries["file"].path == f"{folder}/file"
    assert entries["link"].symlink_target is not None
    deep = {each.path for each in sandbox.files.list(folder, depth=2)}
    assert f"{folder}/dir/deep" in deep


def test_exists_info_rename_remove(sandbox, folder):
    assert sandbox.files.exists(f"{folder}/a") is False
    sandbox.files.write(f"{folder}/a", "abc")
    assert sandbox.files.exists(f"{folder}/a") is True
    info = sandbox.files.get_info(f"{folder}/a")
    assert (info.name, info.size, info.type) == ("a", 3, FileType.FILE)
    moved = sandbox.files.rename(f"{folder}/a", f"{folder}/b")
    assert moved.path == f"{folder}/b"
    assert sandbox.files.exists(f"{folder}/a") is False
    assert sandbox.files.read(f"{folder}/b") == "abc"
    sandbox.files.remove(f"{folder}/b")
    assert sandbox.files.exists(f"{folder}/b") is False


def test_make_dir_says_whether_it_was_new(sandbox, folder):
    assert sandbox.files.make_dir(f"{folder}/p/q/r") is True
    assert sandbox.files.make_dir(f"{folder}/p/q/r") is False


def test_what_is_not_there_is_not_found(sandbox, folder):
    for act in (
        lambda: sandbox.files.read(f"{folder}/none"),
        lambda: sandbox.files.get_info(f"{folder}/none"),
        lambda: sandbox.files.list(f"{folder}/none"),
        lambda: sandbox.files.rename(f"{folder}/none", f"{folder}/other"),
    ):
        with pytest.raises(NotFoundException):
            act()


def test_a_directory_is_no_file(sandbox, folder):
    with pytest.raises(InvalidArgumentException):
        sandbox.files.read(folder)
    sandbox.files.write(f"{folder}/file", "x")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.list(f"{folder}/file")


@pytest.mark.parametrize(
    "name",
    ["with space", "new\nline", "-leading-dash", "🙂 émoji", "quote'\"", "a%2Fb", "trailing ", "$HOME `id`", "..hidden"],
)
def test_odd_names_work_everywhere(sandbox, folder, name):
    path = f"{folder}/{name}"
    sandbox.files.write(path, name)
    assert sandbox.files.read(path) == name
    assert [each.name for each in sandbox.files.list(folder)] == [name]
    assert sandbox.files.get_info(path).name == name
    sandbox.files.rename(path, path + "2")
    sandbox.files.remove(path + "2")
    assert sandbox.files.list(folder) == []


def test_a_name_that_is_no_utf8_hides_nothing_else(sandbox, folder):
    sandbox.commands.run(r"touch good $'bad\377name'", cwd=folder)
    names = [each.name for each in sandbox.files.list(folder)]
    assert len(names) == 2 and "good" in names


def test_watch_reports_changes(sandbox, folder, eventually):
    watch = sandbox.files.watch_dir(folder)
    sandbox.files.write(f"{folder}/new.txt", "x")
    sandbox.files.rename(f"{folder}/new.txt", f"{folder}/renamed.txt")
    sandbox.files.remove(f"{folder}/renamed.txt")
    seen = []

    def all_kinds():
        seen.extend((each.name, each.type) for each in watch.get_new_events())
        kinds = {kind for _, kind in seen}
        return {FilesystemEventType.CREATE, FilesystemEventType.RENAME, FilesystemEventType.REMOVE} <= kinds

    eventually(all_kinds, limit=10, what="create, rename and remove events")
    assert ("new.txt", FilesystemEventType.CREATE) in seen
    watch.stop()


def test_watch_is_recursive_on_request(sandbox, folder, eventually):
    sandbox.files.make_dir(f"{folder}/sub")
    watch = sandbox.files.watch_dir(folder, recursive=True)
    sandbox.files.write(f"{folder}/sub/deep.txt", "x")
    names = []

    def found():
        names.extend(each.name for each in watch.get_new_events())
        return "sub/deep.txt" in names

    eventually(found, limit=10, what="an event from below")
    watch.stop()


def test_watching_what_is_not_there_is_not_found(sandbox, folder):
    with pytest.raises(NotFoundException):
        sandbox.files.watch_dir(f"{folder}/none")


def test_signed_urls_read_and_write_one_path_only(sandbox, folder):
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    sandbox.files.write(f"{folder}/signed.txt", "secret")
    url = on_this_origin(sandbox.download_url(f"{folder}/signed.txt", use_signature_expiration=60))
    answer = httpx.get(url, headers=headers)
    assert (answer.status_code, answer.text) == (200, "secret")
    other = url.replace("signed.txt", "other.txt")
    assert httpx.get(other, headers=headers).status_code == 401
    expired = on_this_origin(sandbox.download_url(f"{folder}/signed.txt", use_signature_expiration=-60))
    assert httpx.get(expired, headers=headers).status_code == 401
    upload = on_this_origin(sandbox.upload_url(f"{folder}/up.txt"))
    answer = httpx.post(upload, headers=headers, files={"file": ("up.txt", b"uploaded")})
    assert answer.status_code == 200, answer.text
    assert sandbox.files.read(f"{folder}/up.txt") == "uploaded"


def on_this_origin(url):
    """The SDK signs for the host-name route; the same path and query work on the one shared origin."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    return f"{os.environ['E2B_SANDBOX_URL']}{parts.path}?{parts.query}"
