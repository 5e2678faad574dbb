//! What a monitor that its guest has taken over may say and leave behind: answers on its control socket, the header of a
//! disk layer, where its memory is mapped.
#![no_main]

use libfuzzer_sys::fuzz_target;
use space_vmm::qemu::fuzzing;

fuzz_target!(|input: &[u8]| {
    let Some((&kind, rest)) = input.split_first() else {
        return;
    };
    match kind {
        b'q' => fuzzing::monitor_lines(rest),
        b'd' => drop(fuzzing::disk_size(rest)),
        _ => {
            if let Ok(text) = std::str::from_utf8(rest) {
                fuzzing::memory_map(text);
            }
        }
    }
});
