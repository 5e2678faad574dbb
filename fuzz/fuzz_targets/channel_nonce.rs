//! Finding the nonce in what a guest left in the data port.
#![no_main]

use libfuzzer_sys::fuzz_target;
use space_channel::{NONCE_LENGTH, Nonce, NonceSearch};

fuzz_target!(|input: &[u8]| {
    let Some((nonce, stream)) = input.split_first_chunk::<NONCE_LENGTH>() else {
        return;
    };
    let Some((&size, stream)) = stream.split_first() else {
        return;
    };
    // Few different bytes make what almost is the nonce likely.
    let narrow = |byte: u8| byte & 1;
    let narrow_nonce = nonce.map(narrow);
    let narrow_stream: Vec<u8> = stream.iter().copied().map(narrow).collect();
    for (nonce, stream) in [(nonce, stream), (&narrow_nonce, &narrow_stream)] {
        let expected = stream
            .windows(NONCE_LENGTH)
            .position(|window| window == nonce)
            .map(|at| at + NONCE_LENGTH);
        let mut search = NonceSearch::new(&Nonce::from_bytes(*nonce));
        let mut fed = 0;
        let found = stream.chunks(usize::from(size).max(1)).find_map(|piece| {
            let end = search.feed(piece).map(|end| fed + end);
            fed += piece.len();
            end
        });
        assert_eq!(found, expected);
    }
});
