use super::*;

const DEB822: &str = "\
# The stock file of the images
Types: deb
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
";

const ONE_LINE: &str = "\
# deb http://old.example/debian bookworm main
deb-src http://mirror.example/debian bookworm main
deb [signed-by=/usr/share/keyrings/a b.gpg arch=amd64] http://mirror.example/debian bookworm main contrib
deb http://mirror.example/debian-security bookworm-security main
deb http://mirror.example/debian bookworm-updates main non-free-firmware # comment
";

fn apt_with(files: &[(&str, &str)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("sources.list.d")).unwrap();
    for (name, text) in files {
        std::fs::write(directory.path().join(name), text).unwrap();
    }
    directory
}

fn read(directory: &tempfile::TempDir, name: &str) -> String {
    std::fs::read_to_string(directory.path().join(name)).unwrap()
}

#[test]
fn deb822_gets_the_suite_in_the_main_stanza_only_and_once() {
    let apt = apt_with(&[("sources.list.d/debian.sources", DEB822)]);
    let change = enable_backports(apt.path()).unwrap();
    let expected = DEB822.replace(
        "bookworm bookworm-updates\n",
        "bookworm bookworm-updates bookworm-backports\n",
    );
    assert_eq!(read(&apt, "sources.list.d/debian.sources"), expected);
    let Change::Edited { backup, .. } = change else {
        panic!("nothing changed")
    };
    assert_eq!(std::fs::read_to_string(backup).unwrap(), DEB822);
    assert_eq!(enable_backports(apt.path()).unwrap(), Change::AlreadyThere);
    assert_eq!(read(&apt, "sources.list.d/debian.sources"), expected);
}

#[test]
fn deb822_with_continuation_lines_comments_and_no_final_newline() {
    let text = "Enabled: no\nTypes: deb\nURIs: http://a.example\nSuites: bookworm\nComponents: main\n\n\
                Components: main\nsuites:\n bookworm\n# in between\n\tbookworm-updates\nTypes: deb-src deb\nURIs: http://b.example";
    let edited = with_suite_deb822(text, UPDATES).unwrap();
    assert_eq!(
        edited,
        text.replace("\tbookworm-updates\n", "\tbookworm-updates bookworm-backports\n")
    );
    assert_eq!(
        with_suite_deb822(&text.replace("deb-src deb", "deb-src"), UPDATES),
        None,
        "sources only"
    );
    assert_eq!(
        with_suite_deb822(&text[..text.find("\n\n").unwrap()], RELEASE),
        None,
        "a disabled stanza"
    );
    let at_the_end = "Types: deb\nURIs: http://a.example\nSuites: bookworm";
    assert_eq!(
        with_suite_deb822(at_the_end, RELEASE).unwrap(),
        format!("{at_the_end} bookworm-backports")
    );
}

#[test]
fn deb822_never_touches_a_security_stanza() {
    let only_security =
        "Types: deb\nURIs: http://mirror.example/debian-security\nSuites: bookworm\nComponents: main\n";
    assert_eq!(with_suite_deb822(only_security, RELEASE), None);
}

#[test]
fn one_line_entries_are_copied_with_their_options() {
    let apt = apt_with(&[("sources.list", ONE_LINE)]);
    enable_backports(apt.path()).unwrap();
    let text = read(&apt, "sources.list");
    let added: Vec<&str> = text
        .lines()
        .filter(|line| !ONE_LINE.lines().any(|old| old == *line))
        .collect();
    assert_eq!(
        added,
        ["deb http://mirror.example/debian bookworm-backports main non-free-firmware # comment"]
    );
    assert_eq!(enable_backports(apt.path()).unwrap(), Change::AlreadyThere);
    let without_updates = ONE_LINE.replace("bookworm-updates", "sid");
    let edited = with_suite_list(&without_updates, RELEASE).unwrap();
    assert!(edited.contains(
        "\ndeb [signed-by=/usr/share/keyrings/a b.gpg arch=amd64] http://mirror.example/debian bookworm-backports main contrib\n"
    ));
}

#[test]
fn a_commented_or_disabled_entry_does_not_count_as_offering_them() {
    let list = "# deb http://mirror.example/debian bookworm-backports main\ndeb http://mirror.example/debian bookworm main";
    let apt = apt_with(&[("sources.list", list), ("sources.list.d/other.disabled", DEB822)]);
    assert!(matches!(
        enable_backports(apt.path()).unwrap(),
        Change::Edited { .. }
    ));
    assert!(
        read(&apt, "sources.list").ends_with("\ndeb http://mirror.example/debian bookworm-backports main\n")
    );
}

#[test]
fn a_machine_of_another_release_is_told_so() {
    let apt = apt_with(&[("sources.list", "deb http://mirror.example/debian sid main\n")]);
    assert!(
        enable_backports(apt.path())
            .unwrap_err()
            .to_string()
            .contains("by hand")
    );
}
