//! Loopback and the one interface, through the classic socket ioctls.
//!
//! Every guest has the same address, so that one snapshot fits every namespace. There is no default route: the way out is
//! the host's to give.

use std::{io, net::Ipv4Addr, os::fd::AsRawFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// The guest's address on `eth0`.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
/// The other end of the link.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
/// Of a /30.
const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 252);
/// The interface.
const INTERFACE: &str = "eth0";

/// Brings the loopback interface up.
pub fn up_loopback() -> io::Result<()> {
    Interface::open("lo")?.up()
}

/// Gives the interface its address and brings it up.
pub fn up_ethernet() -> io::Result<()> {
    let interface = Interface::open(INTERFACE)?;
    interface.set_address(libc::SIOCSIFADDR, ADDRESS)?;
    interface.set_address(libc::SIOCSIFNETMASK, NETMASK)?;
    interface.up()
}

struct Interface {
    socket: std::os::fd::OwnedFd,
    request: libc::ifreq,
}

impl Interface {
    fn open(name: &str) -> io::Result<Self> {
        let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        // SAFETY: ifreq is plain data for which all zeros are valid.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request
            .ifr_name
            .iter_mut()
            .zip(name.bytes().take(libc::IFNAMSIZ - 1))
        {
            *to = libc::c_char::from_ne_bytes([from]);
        }
        Ok(Self { socket, request })
    }

    fn ioctl(&self, command: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
        // SAFETY: all commands used here read or write one ifreq, which lives through the call.
        match unsafe { libc::ioctl(self.socket.as_raw_fd(), command, request) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn set_address(&self, command: libc::Ioctl, address: Ipv4Addr) -> io::Result<()> {
        let mut request = self.request;
        let [family_low, family_high] = libc::sa_family_t::try_from(libc::AF_INET)
            .unwrap_or_default()
            .to_ne_bytes();
        let mut socket_address = [0_u8; 16];
        socket_address[..2].copy_from_slice(&[family_low, family_high]);
        socket_address[4..8].copy_from_slice(&address.octets());
        // SAFETY: sockaddr and its 16 bytes have the same size and no invalid values.
        request.ifr_ifru.ifru_addr =
            unsafe { std::mem::transmute::<[u8; 16], libc::sockaddr>(socket_address) };
        self.ioctl(command, &mut request)
    }

    fn up(&self) -> io::Result<()> {
        let mut request = self.request;
        self.ioctl(libc::SIOCGIFFLAGS, &mut request)?;
        // SAFETY: the kernel has just filled this member in.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        let up = libc::c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or_default();
        request.ifr_ifru.ifru_flags = flags | up;
        self.ioctl(libc::SIOCSIFFLAGS, &mut request)
    }
}
