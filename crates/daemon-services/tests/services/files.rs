//! Files over HTTP and Connect.

use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use base64::Engine;
use reqwest::StatusCode;
use reqwest::multipart::{Form, Part};
use serde_json::{Value, json};

use crate::harness::{Guest, guest};

async fn put(
    guest: &Guest,
    query: &str,
    body: impl Into<reqwest::Body>,
    headers: &[(&str, &str)],
) -> (StatusCode, Value) {
    let mut request = guest
        .http
        .post(format!("{}/files?{query}", guest.address))
        .body(body);
    request = request.header("content-type", "application/octet-stream");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = request.send().await.unwrap();
    (response.status(), response.json().await.unwrap())
}

async fn get(guest: &Guest, query: &str, headers: &[(&str, &str)]) -> reqwest::Response {
    let mut request = guest.http.get(format!("{}/files?{query}", guest.address));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.send().await.unwrap()
}

fn escape(bytes: &[u8]) -> String {
    percent_encoding::percent_encode(bytes, percent_encoding::NON_ALPHANUMERIC).to_string()
}

#[tokio::test]
async fn names_are_bytes() {
    let Some(guest) = guest().await else { return };
    let names: [&[u8]; 7] = [
        b"plain",
        b"with space",
        b"new\nline",
        "\u{1f600}".as_bytes(),
        b"-rf",
        b"bad\xff\xfe",
        b"%41+&=",
    ];
    for name in names {
        let path = [guest.path("deep/").as_bytes(), name].concat();
        let query = format!("path={}", escape(&path));
        let (status, written) = put(&guest, &query, name.to_vec(), &[]).await;
        assert_eq!(status, 200, "{written}");
        assert_eq!(get(&guest, &query, &[]).await.bytes().await.unwrap(), name);
        assert_eq!(std::fs::read(std::ffi::OsStr::from_bytes(&path)).unwrap(), name);
    }
    let list = guest
        .call(
            "filesystem.Filesystem/ListDir",
            "",
            json!({ "path": guest.path("deep") }),
        )
        .await
        .unwrap();
    let entries = list["entries"].as_array().unwrap();
    assert_eq!(entries.len(), names.len());
    // The name that is no text comes back exactly, and can be used so.
    let raw = entries.iter().find_map(|entry| entry.get("rawPath")).unwrap();
    let stat = guest
        .call("filesystem.Filesystem/Stat", "", json!({ "rawPath": raw }))
        .await
        .unwrap();
    let name = base64::engine::general_purpose::STANDARD
        .decode(stat["entry"]["rawName"].as_str().unwrap())
        .unwrap();
    assert_eq!(name, b"bad\xff\xfe");
    guest
        .call("filesystem.Filesystem/Remove", "", json!({ "rawPath": raw }))
        .await
        .unwrap();
}

#[tokio::test]
async fn parts_of_files() {
    let Some(guest) = guest().await else { return };
    let data: Vec<u8> = (0..300_000u32).map(|n| n.to_le_bytes()[0]).collect();
    std::fs::write(guest.path("f"), &data).unwrap();
    let query = format!("path={}", guest.path("f"));
    let whole = get(&guest, &query, &[]).await;
    let etag = whole.headers()["etag"].to_str().unwrap().to_owned();
    assert_eq!(whole.headers()["content-length"], "300000");
    assert_eq!(whole.bytes().await.unwrap(), data);

    let middle = get(
        &guest,
        &query,
        &[("range", "bytes=100000-299998"), ("if-range", &etag)],
    )
    .await;
    assert_eq!(
        (middle.status(), &middle.headers()["content-range"]),
        (
            StatusCode::PARTIAL_CONTENT,
            &"bytes 100000-299998/300000".parse().unwrap()
        )
    );
    assert_eq!(middle.bytes().await.unwrap(), data[100_000..299_999]);
    let other_version = get(
        &guest,
        &query,
        &[("range", "bytes=5-9"), ("if-range", "\"other\"")],
    )
    .await;
    assert_eq!(other_version.status(), 200);
    assert_eq!(
        get(&guest, &query, &[("range", "bytes=300000-")]).await.status(),
        416
    );
    let tail = get(&guest, &query, &[("range", "bytes=-2")]).await;
    assert_eq!(tail.bytes().await.unwrap(), data[299_998..]);
    let proc = get(&guest, "path=/proc/self/status", &[])
        .await
        .text()
        .await
        .unwrap();
    assert!(proc.contains("Pid:"));
    std::fs::write(guest.path("empty"), "").unwrap();
    let empty = get(&guest, &format!("path={}", guest.path("empty")), &[]).await;
    assert_eq!(
        (empty.status(), empty.bytes().await.unwrap().len()),
        (StatusCode::OK, 0)
    );
}

#[tokio::test]
async fn an_upload_can_be_resumed_and_is_digested() {
    let Some(guest) = guest().await else { return };
    let path = guest.path("r");
    put(&guest, &format!("path={path}"), "hello wor", &[]).await;
    let (_, written) = put(
        &guest,
        &format!("path={path}&offset=6&digest=sha256"),
        "world",
        &[],
    )
    .await;
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "hello world");
    assert_eq!(written[0]["size"], 5);
    assert_eq!(
        written[0]["sha256"],
        "486ea46224d1bb4fb680f34f7c9ad96a8f24ec88be73ea8e5a6c65260e9cb8a7"
    );
    let (status, _) = put(&guest, &format!("path={path}&offset=99"), "x", &[]).await;
    assert_eq!(status, 400);
}

#[tokio::test]
async fn forms_carry_several_files() {
    let Some(guest) = guest().await else { return };
    let part = |name: &str, data: &str| Part::text(data.to_owned()).file_name(guest.path(name));
    let form = Form::new()
        .part("file", part("m/one", "1"))
        .text("ignored", "x")
        .part("file", part("m/two words", "22"));
    let response = guest
        .http
        .post(format!("{}/files", guest.address))
        .multipart(form)
        .send()
        .await
        .unwrap();
    let written: Value = response.json().await.unwrap();
    assert_eq!(
        (&written[0]["name"], &written[1]["path"], &written[1]["type"]),
        (&json!("one"), &json!(guest.path("m/two words")), &json!("file"))
    );
    assert_eq!(std::fs::read_to_string(guest.path("m/two words")).unwrap(), "22");
    let large = "x".repeat(5_000_000);
    let form = Form::new().part("file", Part::text(large.clone()).file_name("other"));
    let url = format!("{}/files?path={}", guest.address, guest.path("named"));
    assert_eq!(
        guest
            .http
            .post(url)
            .multipart(form)
            .send()
            .await
            .unwrap()
            .status(),
        200
    );
    assert_eq!(std::fs::read_to_string(guest.path("named")).unwrap(), large);
    let none = guest
        .http
        .post(format!("{}/files", guest.address))
        .multipart(Form::new().text("a", "b"));
    assert_eq!(none.send().await.unwrap().status(), 400);
}

#[tokio::test]
async fn compression() {
    let Some(guest) = guest().await else { return };
    let data = "compress me ".repeat(50_000);
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data.as_bytes()).unwrap();
    let packed = encoder.finish().unwrap();
    let query = format!("path={}", guest.path("z"));
    let gzip = [("content-encoding", "gzip")];
    let (status, written) = put(&guest, &query, packed.clone(), &gzip).await;
    assert_eq!(
        (status, &written[0]["size"]),
        (StatusCode::OK, &json!(data.len()))
    );
    assert_eq!(std::fs::read_to_string(guest.path("z")).unwrap(), data);
    let answer = get(&guest, &query, &[("accept-encoding", "gzip")]).await;
    assert_eq!(answer.headers()["content-encoding"], "gzip");
    let mut text = String::new();
    flate2::read::GzDecoder::new(&answer.bytes().await.unwrap()[..])
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(text, data);
    let habit = get(&guest, &query, &[("accept-encoding", "gzip, deflate, br")]).await;
    assert!(!habit.headers().contains_key("content-encoding"));
    assert_eq!(
        get(&guest, &query, &[("accept-encoding", "br, identity;q=0")])
            .await
            .status(),
        406
    );

    let fresh = format!("path={}", guest.path("broken"));
    assert_eq!(
        put(&guest, &fresh, packed[..packed.len() / 2].to_vec(), &gzip)
            .await
            .0,
        400
    );
    assert_eq!(put(&guest, &fresh, "no gzip at all", &gzip).await.0, 400);
    assert!(!std::path::Path::new(&guest.path("broken")).exists());
    assert_eq!(
        put(&guest, &fresh, "x", &[("content-encoding", "br")]).await.0,
        400
    );
}

#[tokio::test]
async fn the_account_decides_what_can_be_touched() {
    let Some(guest) = guest().await else { return };
    let secret = guest.path("secret");
    std::fs::write(&secret, "root's").unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::symlink(&secret, guest.path("link")).unwrap();
    for name in ["secret", "link"] {
        let query = format!("path={}&username=nobody", guest.path(name));
        assert_eq!(get(&guest, &query, &[]).await.status(), 403);
        assert_eq!(put(&guest, &query, "mine", &[]).await.0, 403);
    }
    assert_eq!(
        get(&guest, &format!("path={secret}&username=nope"), &[])
            .await
            .status(),
        401
    );
    let remove = guest
        .call(
            "filesystem.Filesystem/Remove",
            "nobody",
            json!({ "path": secret }),
        )
        .await;
    assert_eq!(remove.unwrap_err().0, "permission_denied");
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "root's");

    std::fs::create_dir(guest.path("open")).unwrap();
    std::fs::set_permissions(guest.path("open"), std::fs::Permissions::from_mode(0o777)).unwrap();
    let query = format!("path={}&username=nobody", guest.path("open/a/b"));
    assert_eq!(put(&guest, &query, "mine", &[]).await.0, 200);
    for path in ["open/a", "open/a/b"] {
        assert_eq!(
            std::fs::metadata(guest.path(path)).unwrap().uid(),
            65534,
            "{path}"
        );
    }
    let stat = guest
        .call(
            "filesystem.Filesystem/Stat",
            "",
            json!({ "path": guest.path("open/a/b") }),
        )
        .await
        .unwrap();
    assert_eq!(
        (&stat["entry"]["owner"], &stat["entry"]["group"]),
        (&json!("nobody"), &json!("nogroup"))
    );
}

#[tokio::test]
async fn errors_have_their_codes() {
    let Some(guest) = guest().await else { return };
    std::fs::create_dir(guest.path("d")).unwrap();
    nix::unistd::mkfifo(guest.path("fifo").as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (name, status) in [("missing", 404), ("d", 400), ("fifo", 400)] {
        assert_eq!(
            get(&guest, &format!("path={}", guest.path(name)), &[])
                .await
                .status(),
            status,
            "{name}"
        );
    }
    assert_eq!(
        put(&guest, &format!("path={}", guest.path("d")), "x", &[])
            .await
            .0,
        400
    );
    assert_eq!(
        put(&guest, &format!("path={}", guest.path("fifo")), "x", &[])
            .await
            .0,
        400
    );
    assert_eq!(put(&guest, "", "x", &[]).await.0, 400);
    let calls = [
        ("Stat", json!({ "path": guest.path("missing") }), "not_found"),
        ("ListDir", json!({ "path": guest.path("missing") }), "not_found"),
        (
            "ListDir",
            json!({ "path": guest.path("fifo") }),
            "invalid_argument",
        ),
        ("MakeDir", json!({ "path": guest.path("d") }), "already_exists"),
        (
            "MakeDir",
            json!({ "path": guest.path("fifo") }),
            "invalid_argument",
        ),
        (
            "Move",
            json!({ "source": guest.path("missing"), "destination": guest.path("x") }),
            "not_found",
        ),
        ("Remove", json!({ "path": "/" }), "invalid_argument"),
        ("Stat", json!({ "path": "~root/x" }), "invalid_argument"),
        ("Stat", json!({ "path": "x".repeat(5000) }), "invalid_argument"),
    ];
    for (method, body, code) in calls {
        let error = guest
            .call(&format!("filesystem.Filesystem/{method}"), "", body)
            .await
            .unwrap_err();
        assert_eq!(error.0, code, "{method}: {error:?}");
    }
    guest
        .call(
            "filesystem.Filesystem/Remove",
            "",
            json!({ "path": guest.path("missing") }),
        )
        .await
        .unwrap();
}

#[tokio::test]
async fn metadata_and_joining() {
    let Some(guest) = guest().await else { return };
    let query = |name: &str| format!("path={}", guest.path(name));
    let (status, written) = put(&guest, &query("one"), "1", &[("X-Metadata-Kind", "test value")]).await;
    if status == 400 {
        eprintln!("SKIPPED: no extended attributes here: {written}");
        return;
    }
    assert_eq!(written[0]["metadata"], json!({ "kind": "test value" }));
    let stat = |name: &str| {
        guest.call(
            "filesystem.Filesystem/Stat",
            "",
            json!({ "path": guest.path(name) }),
        )
    };
    assert_eq!(
        stat("one").await.unwrap()["entry"]["metadata"],
        json!({ "kind": "test value" })
    );
    put(&guest, &query("one"), "1", &[]).await;
    assert!(stat("one").await.unwrap()["entry"]["metadata"].is_null());

    put(&guest, &query("two"), "22", &[]).await;
    let order = json!({ "source_paths": [guest.path("one"), guest.path("two")], "destination": guest.path("sum/all") });
    let joined = guest.call("files/compose", "", order.clone()).await.unwrap();
    assert_eq!(joined["size"], 3);
    assert_eq!(std::fs::read_to_string(guest.path("sum/all")).unwrap(), "122");
    assert_eq!(
        std::fs::metadata(guest.path("one")).unwrap_err().kind(),
        std::io::ErrorKind::NotFound
    );
    assert!(
        guest
            .call("files/compose", "", order)
            .await
            .unwrap_err()
            .1
            .contains("does not exist")
    );
}

#[tokio::test]
async fn a_full_disk_is_told_and_leaves_no_part() {
    let Some(guest) = guest().await else { return };
    let mount = guest.path("small");
    std::fs::create_dir(&mount).unwrap();
    let flags = nix::mount::MsFlags::empty();
    if let Err(error) = nix::mount::mount(
        Some("tmpfs"),
        mount.as_str(),
        Some("tmpfs"),
        flags,
        Some("size=1m"),
    ) {
        eprintln!("SKIPPED: cannot mount a small file system: {error}");
        return;
    }
    struct Unmount(String);
    impl Drop for Unmount {
        fn drop(&mut self) {
            nix::mount::umount(self.0.as_str()).ok();
        }
    }
    let _unmount = Unmount(mount.clone());
    let (status, body) = put(&guest, &format!("path={mount}/big"), vec![1; 3_000_000], &[]).await;
    assert_eq!(status, 507, "{body}");
    assert!(
        body["message"]
            .as_str()
            .unwrap()
            .contains("not enough disk space"),
        "{body}"
    );
    assert!(!std::path::Path::new(&format!("{mount}/big")).exists());
    std::fs::write(format!("{mount}/old"), "old").unwrap();
    let (status, body) = put(&guest, &format!("path={mount}/old"), vec![1; 3_000_000], &[]).await;
    assert_eq!(status, 507);
    assert!(body["message"].as_str().unwrap().contains("incomplete"), "{body}");
}
