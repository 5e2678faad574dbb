//! What the memory of a monitor is made of, read from `/proc/PID/smaps`.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context as _, Result, ensure};

/// Kinds of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Pages of the template's memory file that the guest has not written to.
    GuestShared,
    /// The guest's own pages: copied when they were written to.
    GuestPrivate,
    /// The guest's code as the emulator has translated it.
    TranslatedCode,
    /// The monitor's heap, stacks and tables.
    Heap,
    /// The monitor's program and its libraries.
    Program,
    /// Anything else.
    Other,
}

impl Kind {
    /// All of them.
    pub(crate) const ALL: [Self; 6] = [
        Self::GuestShared,
        Self::GuestPrivate,
        Self::TranslatedCode,
        Self::Heap,
        Self::Program,
        Self::Other,
    ];

    /// Its name in the JSON file.
    pub(crate) const fn key(self) -> &'static str {
        match self {
            Self::GuestShared => "guest_shared",
            Self::GuestPrivate => "guest_private",
            Self::TranslatedCode => "translated_code",
            Self::Heap => "heap",
            Self::Program => "program",
            Self::Other => "other",
        }
    }

    /// Its name for people.
    pub(crate) const fn what(self) -> &'static str {
        match self {
            Self::GuestShared => "guest memory shared with the template",
            Self::GuestPrivate => "guest memory of its own",
            Self::TranslatedCode => "translated code",
            Self::Heap => "QEMU's heap and stacks",
            Self::Program => "QEMU and its libraries",
            Self::Other => "other",
        }
    }
}

/// An amount of memory, bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    /// In memory.
    pub(crate) resident: u64,
    /// The same, with shared pages divided by those who share them.
    pub(crate) proportional: u64,
    /// What nobody shares.
    pub(crate) private: u64,
}

impl Amount {
    /// Adds another.
    pub(crate) fn add(&mut self, other: Self) {
        self.resident += other.resident;
        self.proportional += other.proportional;
        self.private += other.private;
    }
}

/// Amounts by kind.
pub(crate) type Parts = BTreeMap<Kind, Amount>;

/// What the memory of a process is made of; `memory_inode` is that of the template's memory file.
pub(crate) fn parts_of(process: &Path, memory_inode: u64) -> Result<Parts> {
    let text = fs_err::read_to_string(process.join("smaps"))?;
    parse(&text, memory_inode).context("smaps has another form than expected")
}

/// All kinds together.
pub(crate) fn sum(parts: &Parts) -> Amount {
    let mut sum = Amount::default();
    parts.values().for_each(|amount| sum.add(*amount));
    sum
}

/// One mapping: its first line, and the sums under it.
#[derive(Debug, Default)]
struct Mapping<'a> {
    permissions: &'a str,
    inode: u64,
    path: &'a str,
    resident: u64,
    proportional: u64,
    private: u64,
    anonymous: u64,
}

fn parse(text: &str, memory_inode: u64) -> Result<Parts> {
    let mut parts = Parts::new();
    let mut mapping: Option<Mapping<'_>> = None;
    let mut count = 0;
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        let Some(name) = first.strip_suffix(':') else {
            if let Some(done) = mapping.replace(first_line(line)?) {
                done.add_to(&mut parts, memory_inode);
            }
            count += 1;
            continue;
        };
        let Some(mapping) = &mut mapping else {
            continue;
        };
        let target = match name {
            "Rss" => &mut mapping.resident,
            "Pss" => &mut mapping.proportional,
            "Private_Clean" | "Private_Dirty" => &mut mapping.private,
            "Anonymous" => &mut mapping.anonymous,
            _ => continue,
        };
        let amount: u64 = words.next().unwrap_or_default().parse()?;
        *target += amount * 1024;
    }
    ensure!(count > 0, "there is no mapping");
    if let Some(last) = mapping {
        last.add_to(&mut parts, memory_inode);
    }
    Ok(parts)
}

/// `address permissions offset device inode path`
fn first_line(line: &str) -> Result<Mapping<'_>> {
    let mut fields = line.splitn(6, ' ');
    let permissions = fields.nth(1).context("no permissions")?;
    let inode = fields.nth(2).context("no inode")?.parse()?;
    Ok(Mapping {
        permissions,
        inode,
        path: fields.next().unwrap_or_default().trim(),
        ..Mapping::default()
    })
}

impl Mapping<'_> {
    fn add_to(&self, parts: &mut Parts, memory_inode: u64) {
        let all = Amount {
            resident: self.resident,
            proportional: self.proportional,
            private: self.private,
        };
        if self.inode != 0 && self.inode == memory_inode {
            // A page that was written to is anonymous, and its own alone: a monitor has no children.
            let own = self.anonymous.min(self.private);
            parts.entry(Kind::GuestPrivate).or_default().add(Amount {
                resident: own,
                proportional: own,
                private: own,
            });
            parts.entry(Kind::GuestShared).or_default().add(Amount {
                resident: all.resident.saturating_sub(own),
                proportional: all.proportional.saturating_sub(own),
                private: all.private - own,
            });
            return;
        }
        let kind = match self.path {
            "" if self.permissions.contains('x') => Kind::TranslatedCode,
            "" | "[heap]" => Kind::Heap,
            path if path.starts_with("[stack") || path.starts_with("[anon:") => Kind::Heap,
            path if path.contains("qemu-system") || path.contains(".so") => Kind::Program,
            _ => Kind::Other,
        };
        parts.entry(kind).or_default().add(all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
7f0000000000-7f0020000000 rw-p 00000000 fe:00 4711                       /x/memory
Size:             524288 kB
Rss:               80000 kB
Pss:               35000 kB
Pss_Dirty:         30000 kB
Shared_Clean:      50000 kB
Shared_Dirty:          0 kB
Private_Clean:         0 kB
Private_Dirty:     30000 kB
Anonymous:         30000 kB
VmFlags: rd wr mr mw me ac
7f0020000000-7f0060000000 rwxp 00000000 00:00 0
Rss:                9000 kB
Pss:                9000 kB
Private_Dirty:      9000 kB
Anonymous:          9000 kB
7f0060000000-7f0060100000 r-xp 00000000 fe:00 12                         /usr/bin/qemu-system-x86_64
Rss:                4000 kB
Pss:                1000 kB
Private_Clean:         0 kB
Anonymous:             0 kB
7f0060100000-7f0060200000 rw-p 00000000 00:00 0                          [heap]
Rss:                 700 kB
Pss:                 700 kB
Private_Dirty:       700 kB
Anonymous:           700 kB
";

    #[test]
    fn each_mapping_goes_to_its_kind() {
        let parts = parse(TEXT, 4711).unwrap();
        let of = |kind| {
            let amount: &Amount = &parts[&kind];
            [amount.resident, amount.proportional, amount.private].map(|bytes| bytes / 1024)
        };
        assert_eq!(of(Kind::GuestShared), [50_000, 5_000, 0]);
        assert_eq!(of(Kind::GuestPrivate), [30_000, 30_000, 30_000]);
        assert_eq!(of(Kind::TranslatedCode), [9_000, 9_000, 9_000]);
        assert_eq!(of(Kind::Program), [4_000, 1_000, 0]);
        assert_eq!(of(Kind::Heap), [700, 700, 700]);
        assert_eq!(sum(&parts).proportional / 1024, 45_700);
    }

    #[test]
    fn our_own_memory_adds_up() {
        let parts = parts_of(Path::new("/proc/self"), 1).unwrap();
        let sum = sum(&parts);
        assert!(sum.private > 0 && sum.resident >= sum.proportional && sum.proportional >= sum.private);
        assert!(!parts.contains_key(&Kind::GuestShared));
        assert!(parse("nonsense", 1).is_err() && parse("", 1).is_err());
    }
}
