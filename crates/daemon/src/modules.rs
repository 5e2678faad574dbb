//! Loading kernel modules from the initramfs.

use std::{fs::File, io, path::Path};

use rustix::{io::Errno, system::finit_module};

/// Loads the modules that `order` in `directory` names, one file name per line, in that order. Already loaded ones and a
/// missing list are fine.
pub fn load_all(directory: &Path) -> io::Result<()> {
    let order = match std::fs::read_to_string(directory.join("order")) {
        Ok(order) => order,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for name in order.lines().map(str::trim).filter(|name| !name.is_empty()) {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("module {name}: {error}"));
        let file = File::open(directory.join(name)).map_err(named)?;
        match finit_module(file, c"", 0) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(named(error.into())),
        }
    }
    Ok(())
}
