//! Recipes: what a template is made of, read from TOML and checked before anything is built.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use space_api::size::SizeClass;

use crate::{Label, VolumeError};

/// Longest recipe file, bytes.
const MAX_RECIPE: usize = 256 * 1024;
/// Most entries of any list.
const MAX_ENTRIES: usize = 512;
/// Longest command or environment value, bytes.
const MAX_TEXT: usize = 64 * 1024;

/// What a template is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Name to publish under.
    pub name: Label,
    /// Tag to publish under.
    #[serde(default = "latest")]
    pub tag: Label,
    /// Debian packages, beside those of `base`.
    #[serde(default)]
    pub packages: BTreeSet<String>,
    /// Leave out the packages of `base`: only Debian's essential ones, apt and `packages` are there.
    #[serde(default)]
    pub minimal: bool,
    /// A ready root image (erofs) to use instead of building one; excludes `packages` and `files`.
    #[serde(default)]
    pub image: Option<PathBuf>,
    /// Files and directories of the host to copy in, owned by root.
    #[serde(default)]
    pub files: Vec<CopiedFile>,
    /// Shell commands run in order, as root, inside the booted machine; the first that fails ends the build.
    #[serde(default)]
    pub run: Vec<String>,
    /// Environment of every process started in a sandbox.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// A command left running in the snapshot.
    #[serde(default)]
    pub start: Option<StartCommand>,
    /// A command that tells when the machine is ready to be snapshotted.
    #[serde(default)]
    pub ready: Option<ReadyCommand>,
    /// Size of a sandbox that asks for none.
    #[serde(default = "default_size")]
    pub default_size: SizeClass,
}

/// A host file or directory and where it goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopiedFile {
    /// Path on the host.
    pub host: PathBuf,
    /// Absolute path in the guest.
    pub guest: PathBuf,
}

/// A command left running.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartCommand {
    /// For `bash -l -c`.
    pub command: String,
    /// Who runs it.
    #[serde(default = "ordinary_user")]
    pub user: String,
}

/// A command polled until it succeeds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadyCommand {
    /// For `bash -l -c`.
    pub command: String,
    /// How long to go on trying, 1 to 3600 s.
    #[serde(default = "ready_deadline")]
    pub deadline_seconds: u64,
}

impl ReadyCommand {
    /// How long to go on trying.
    pub fn deadline(&self) -> Duration {
        Duration::from_secs(self.deadline_seconds)
    }
}

impl Recipe {
    /// The built-in `base`.
    pub fn base() -> Result<Self, VolumeError> {
        Self::from_toml(include_str!("../templates/base.toml"))
    }

    /// Reads and checks a recipe.
    pub fn from_toml(text: &str) -> Result<Self, VolumeError> {
        if text.len() > MAX_RECIPE {
            return Err(refuse(format!("it is longer than {MAX_RECIPE} bytes")));
        }
        let recipe: Self = toml::from_str(text).map_err(|error| refuse(error.to_string()))?;
        recipe.check()?;
        Ok(recipe)
    }

    /// Reads a recipe from a file; relative paths of the host in it start at the file's directory.
    pub fn from_file(path: &Path) -> Result<Self, VolumeError> {
        let text = fs_err::read_to_string(path).map_err(VolumeError::io("read the recipe"))?;
        let mut recipe = Self::from_toml(&text)?;
        let directory = path.parent().unwrap_or(Path::new(""));
        for host in recipe
            .files
            .iter_mut()
            .map(|file| &mut file.host)
            .chain(recipe.image.as_mut())
        {
            *host = directory.join(&host);
        }
        Ok(recipe)
    }

    /// Every package the root is made of.
    pub(crate) fn all_packages(&self) -> Result<BTreeSet<String>, VolumeError> {
        let mut packages = if self.minimal {
            BTreeSet::new()
        } else {
            Self::base()?.packages
        };
        packages.extend(self.packages.iter().cloned());
        Ok(packages)
    }

    fn check(&self) -> Result<(), VolumeError> {
        for (what, count) in [
            ("packages", self.packages.len()),
            ("files", self.files.len()),
            ("run", self.run.len()),
            ("environment", self.environment.len()),
        ] {
            if count > MAX_ENTRIES {
                return Err(refuse(format!("`{what}` has more than {MAX_ENTRIES} entries")));
            }
        }
        if self.image.is_some() && !(self.packages.is_empty() && self.files.is_empty()) {
            return Err(refuse("`image` excludes `packages` and `files`".to_owned()));
        }
        for package in &self.packages {
            check_package(package)?;
        }
        for file in &self.files {
            check_guest_path(&file.guest)?;
        }
        let commands = self.run.iter();
        let commands = commands.chain(self.start.iter().map(|start| &start.command));
        for command in commands.chain(self.ready.iter().map(|ready| &ready.command)) {
            check_text("a command", command)?;
        }
        for (name, value) in &self.environment {
            check_environment_name(name)?;
            check_text("an environment value", value)?;
        }
        if let Some(start) = &self.start {
            check_user(&start.user)?;
        }
        if let Some(ready) = &self.ready
            && !(1..=3600).contains(&ready.deadline_seconds)
        {
            return Err(refuse("`ready.deadline_seconds` must be 1 to 3600".to_owned()));
        }
        Ok(())
    }
}

fn latest() -> Label {
    "latest".parse().expect("a constant that is a valid label")
}

fn default_size() -> SizeClass {
    SizeClass::DEFAULT
}

fn ordinary_user() -> String {
    "user".to_owned()
}

fn ready_deadline() -> u64 {
    60
}

fn refuse(what: String) -> VolumeError {
    VolumeError::BadRecipe { what }
}

/// Debian policy 5.6.1; above all, nothing that a package tool could take for an option, a path or a pattern.
fn check_package(name: &str) -> Result<(), VolumeError> {
    let bytes = name.as_bytes();
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let valid = (2..=100).contains(&bytes.len())
        && plain(bytes[0])
        && bytes.iter().all(|&byte| plain(byte) || matches!(byte, b'+' | b'-' | b'.'))
        // apt takes a last `-` or `+` for "remove" and "install"; real names ending in `+` (g++) are fine as install.
        && bytes[bytes.len() - 1] != b'-';
    if valid {
        Ok(())
    } else {
        Err(refuse(format!(
            "\"{}\" is not the name of a Debian package",
            name.escape_default()
        )))
    }
}

fn check_guest_path(path: &Path) -> Result<(), VolumeError> {
    let mut parts = path.components();
    let valid = parts.next() == Some(Component::RootDir)
        && parts.clone().next().is_some()
        && parts.all(|part| matches!(part, Component::Normal(_)));
    if valid {
        Ok(())
    } else {
        Err(refuse(format!(
            "{path:?} is not an absolute path of the guest without `..`"
        )))
    }
}

fn check_environment_name(name: &str) -> Result<(), VolumeError> {
    let valid = (1..=255).contains(&name.len())
        && !name.starts_with(|first: char| first.is_ascii_digit())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if valid {
        Ok(())
    } else {
        Err(refuse(format!(
            "\"{}\" is not the name of a variable",
            name.escape_default()
        )))
    }
}

fn check_user(name: &str) -> Result<(), VolumeError> {
    let valid = (1..=32).contains(&name.len())
        && name.starts_with(|first: char| first.is_ascii_lowercase() || first == '_')
        && name
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-'));
    if valid {
        Ok(())
    } else {
        Err(refuse(format!(
            "\"{}\" is not the name of a user",
            name.escape_default()
        )))
    }
}

fn check_text(what: &str, text: &str) -> Result<(), VolumeError> {
    if text.len() > MAX_TEXT {
        return Err(refuse(format!("{what} is longer than {MAX_TEXT} bytes")));
    }
    if text.contains('\0') {
        return Err(refuse(format!("{what} contains a zero byte")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn base_is_valid_and_has_what_agents_need() {
        let base = Recipe::base().unwrap();
        assert_eq!(base.name.as_str(), "base");
        assert_eq!(base.tag.as_str(), "latest");
        for package in ["python3", "nodejs", "npm", "git", "sudo", "curl"] {
            assert!(base.packages.contains(package), "{package}");
        }
    }

    #[test]
    fn a_full_recipe_is_read() {
        let recipe = Recipe::from_toml(
            r#"
            name = "web"
            tag = "v2"
            packages = ["nginx", "g++"]
            run = ["echo hi > /srv/x"]
            default_size = "2x1024x8192"
            files = [{ host = "site", guest = "/srv/site" }]
            [environment]
            PORT = "8080"
            [start]
            command = "nginx -g 'daemon off;'"
            [ready]
            command = "curl -sf localhost:8080"
            "#,
        )
        .unwrap();
        assert_eq!(recipe.start.as_ref().unwrap().user, "user");
        assert_eq!(recipe.ready.as_ref().unwrap().deadline(), Duration::from_secs(60));
        assert_eq!(recipe.default_size.to_string(), "2x1024x8192");
        let packages = recipe.all_packages().unwrap();
        assert!(packages.contains("nginx") && packages.contains("python3"));
    }

    #[test]
    fn relative_paths_start_at_the_recipe() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.toml");
        let text =
            "name = 'web'\nfiles = [{ host = 'site', guest = '/srv' }, { host = '/abs', guest = '/abs' }]";
        fs_err::write(&path, text).unwrap();
        let recipe = Recipe::from_file(&path).unwrap();
        assert_eq!(recipe.files[0].host, directory.path().join("site"));
        assert_eq!(recipe.files[1].host, Path::new("/abs"));
        assert!(Recipe::from_file(&directory.path().join("none.toml")).is_err());
    }

    #[test]
    fn bad_recipes_name_what_is_wrong() {
        for (text, word) in [
            ("", "name"),
            ("name = 'x'\nnmae = 1", "nmae"),
            ("name = '../x'", "does not name"),
            ("name = 'x'\npackages = ['--root=/']", "Debian package"),
            ("name = 'x'\npackages = ['vim-']", "Debian package"),
            ("name = 'x'\npackages = ['a b']", "Debian package"),
            (
                "name = 'x'\nfiles = [{ host = 'a', guest = '/a/../etc' }]",
                "guest",
            ),
            ("name = 'x'\nfiles = [{ host = 'a', guest = 'etc' }]", "guest"),
            ("name = 'x'\nfiles = [{ host = 'a', guest = '/' }]", "guest"),
            ("name = 'x'\n[environment]\n'A=B' = 'c'", "variable"),
            ("name = 'x'\n[start]\ncommand = 'a'\nuser = 'root:root'", "user"),
            (
                "name = 'x'\n[ready]\ncommand = 'a'\ndeadline_seconds = 0",
                "deadline",
            ),
            ("name = 'x'\ndefault_size = '1x1x1'", "memory"),
            ("name = 'x'\nimage = 'a'\npackages = ['vim']", "excludes"),
            ("name = 'x'\nrun = [\"a\\u0000b\"]", "zero byte"),
        ] {
            let error = Recipe::from_toml(text).unwrap_err();
            assert!(matches!(error, VolumeError::BadRecipe { .. }), "{text}");
            assert!(error.to_string().contains(word), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "\\PC{0,400}") {
            drop(Recipe::from_toml(&text));
        }

        #[test]
        fn accepted_packages_are_never_options_or_paths(name in "[ -~]{0,12}") {
            if check_package(&name).is_ok() {
                prop_assert!(!name.starts_with('-') && !name.contains(['/', ',', ' ', '=', '?', '*', '~', ':']));
            }
        }
    }
}
