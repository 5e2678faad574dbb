//! The streams of messages with which a guest answers the host while its template is built.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((&size, stream)) = input.split_first() else {
        return;
    };
    let at_once = space_volume::fuzzing::messages(&[stream]);
    let pieces: Vec<&[u8]> = stream.chunks(usize::from(size).max(1)).collect();
    assert_eq!(at_once, space_volume::fuzzing::messages(&pieces));
});
