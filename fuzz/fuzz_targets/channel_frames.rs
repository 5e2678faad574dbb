//! What a guest may write to the control port: frames and messages, however the stream is cut.
#![no_main]

use libfuzzer_sys::fuzz_target;
use space_channel::{FrameDecoder, GuestControl, GuestMessage, HostMessage, decode_any, frame::MAX_FRAME};

fuzz_target!(|input: &[u8]| {
    decode_any(input);

    // The first byte says how large the pieces are in which the rest arrives.
    let Some((&size, stream)) = input.split_first() else {
        return;
    };
    let mut whole = FrameDecoder::new();
    let mut cut = FrameDecoder::new();
    let mut rest = stream;
    let at_once: Vec<_> = std::iter::from_fn(|| whole.next(&mut rest)).collect();
    let mut in_pieces = Vec::new();
    for piece in stream.chunks(usize::from(size).max(1)) {
        let mut rest = piece;
        in_pieces.extend(std::iter::from_fn(|| cut.next(&mut rest)));
    }
    // A stream that is seen in pieces may show a hello within a frame that would have become whole later, and so give up
    // that frame; every other frame is the same.
    if !in_pieces
        .iter()
        .any(|frame| matches!(frame.kind, 0x0001 | 0x0101))
    {
        assert_eq!(at_once, in_pieces);
    }
    assert!(whole.skipped() <= stream.len() as u64);

    for frame in at_once {
        assert!(frame.payload.len() <= MAX_FRAME);
        // What is understood is said the same way again.
        let mut again = Vec::new();
        if let Ok(message) = HostMessage::decode(&frame) {
            message
                .encode(frame.sequence, &mut again)
                .expect("within its bounds");
            assert_eq!(HostMessage::decode(&only(&again)), Ok(message));
        }
        again.clear();
        if let Ok(message) = GuestMessage::decode(&frame) {
            message.encode(frame.sequence, &mut again);
            assert_eq!(GuestMessage::decode(&only(&again)), Ok(message));
        }
    }
    let mut guest = GuestControl::new();
    let mut rest = stream;
    while guest.next(&mut rest).is_some() {}
});

fn only(mut bytes: &[u8]) -> space_channel::Frame {
    FrameDecoder::new().next(&mut bytes).expect("one whole frame")
}
