//! Tunnels from the host to ports inside the guest, on HTTP/2 `CONNECT`.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use axum::body::Body;
use http::{HeaderValue, Request, Response, StatusCode, uri::Authority};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::{io::copy_bidirectional_with_sizes, net::TcpStream, time::timeout};

use crate::{
    data::{Counted, SessionTasks},
    network,
};

/// Where a service may listen, in the order tried.
const ADDRESSES: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
    IpAddr::V4(network::ADDRESS),
];
/// How long one address may take; local ones answer at once, unless their queue is full.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Bytes buffered in each direction.
const BUFFER: usize = 16 * 1024;
/// Tells the host that nothing listens there.
const PORT_CLOSED: &str = "space-port-closed";

/// Answers a `CONNECT`: 200 and a tunnel, 400 if the authority is none of the guest's, 502 if nothing listens. The tunnel is
/// counted as long as it is open.
pub async fn connect(request: Request<Incoming>, tasks: &SessionTasks, counted: Counted) -> Response<Body> {
    let Some(port) = request.uri().authority().and_then(loopback_port) else {
        return plain(
            StatusCode::BAD_REQUEST,
            "name 127.0.0.1 or localhost with a port\n",
        );
    };
    let Some(inner) = dial(port).await else {
        let mut response = plain(StatusCode::BAD_GATEWAY, "nothing listens on this port\n");
        response
            .headers_mut()
            .insert(PORT_CLOSED, HeaderValue::from_static("1"));
        return response;
    };
    tasks.spawn(async move {
        let Ok(outer) = hyper::upgrade::on(request).await else {
            return;
        };
        let (mut outer, mut inner) = (TokioIo::new(outer), inner);
        // An error is one side's end, which the other learns from its closed connection.
        drop(copy_bidirectional_with_sizes(&mut outer, &mut inner, BUFFER, BUFFER).await);
        drop(counted);
    });
    Response::new(Body::empty())
}

fn loopback_port(authority: &Authority) -> Option<u16> {
    match authority.host() {
        "127.0.0.1" | "localhost" => authority.port_u16().filter(|&port| port != 0),
        _ => None,
    }
}

async fn dial(port: u16) -> Option<TcpStream> {
    for address in ADDRESSES {
        if let Ok(Ok(stream)) =
            timeout(CONNECT_LIMIT, TcpStream::connect(SocketAddr::new(address, port))).await
        {
            // Not being able to switch it costs only latency.
            drop(stream.set_nodelay(true));
            return Some(stream);
        }
    }
    None
}

fn plain(status: StatusCode, words: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::from(words));
    *response.status_mut() = status;
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_ports_are_reached() {
        let port = |text: &str| loopback_port(&text.parse().unwrap());
        assert_eq!(port("127.0.0.1:80"), Some(80));
        assert_eq!(port("localhost:65535"), Some(65535));
        for refused in [
            "127.0.0.1",
            "127.0.0.1:0",
            "10.0.0.1:80",
            "example.org:80",
            "[::1]:80",
            "127.0.0.2:80",
        ] {
            assert_eq!(port(refused), None, "{refused}");
        }
    }
}
