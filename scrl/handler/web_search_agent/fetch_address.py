"""Which addresses a page may be fetched from: public unicast ones, by the IANA special-purpose registries.

Written out rather than left to ``ipaddress.is_global``, whose answers change between Python's releases and let
multicast, 6to4 and NAT64 addresses through.
"""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import psutil

Resolver = Callable[[str, int, float], list[str]]  # (host, port, deadline in time.monotonic() seconds) -> addresses

_REFUSED_V4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network, unspecified
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT; Alibaba's metadata service
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's platform and metadata service, on a public address
        "169.254.0.0/16",  # link-local; most clouds' metadata service
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata service
        "192.0.2.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
_GLOBAL_V6 = IPv6Network("2000::/3")  # all that is routed; loopback, private, link-local, multicast lie outside
_REFUSED_V6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",
        "3fff::/20",  # documentation, like the one above
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether ``address`` is one that only the public internet has. Text that is no address is not.

    An IPv4 address inside an IPv6 one (mapped, NAT64, 6to4) is judged as what it is; for all others of that kind
    (IPv4-compatible, Teredo, a network's own NAT64 prefix) the answer is no.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, IPv6Address):
        inner = _embedded_v4(ip)
        if inner is None:
            return ip.scope_id is None and ip in _GLOBAL_V6 and not any(ip in network for network in _REFUSED_V6)
        ip = inner
    return not any(ip in network for network in _REFUSED_V4)


def is_elsewhere(address: str) -> bool:
    """Whether ``address`` is public and no interface of this machine has it, as one of a rented machine may."""
    if not is_public(address):
        return False
    ip = ip_address(address)
    inner = _embedded_v4(ip) if isinstance(ip, IPv6Address) else None
    return (inner or ip) not in own_addresses()


def own_addresses() -> set[IPv4Address | IPv6Address]:
    """Those of this machine's interfaces; under a millisecond, so that one that comes up later counts too."""
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = psutil.net_if_addrs().values()
    return {ip_address(one.address.partition("%")[0]) for all_ in interfaces for one in all_ if one.family in families}


def _embedded_v4(ip: IPv6Address) -> IPv4Address | None:
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour


def resolve(host: str, port: int, deadline: float) -> list[str]:
    """The addresses of ``host`` by the system's resolver, each once. Raises OSError, TimeoutError at the deadline.

    libc's look-up can't be told to stop, so it has a thread of its own, which ends when libc gives up.
    """
    answer: Future[list[str]] = Future()

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.set_result(list(dict.fromkeys(str(info[4][0]) for info in found)))
        except (OSError, UnicodeError) as error:  # UnicodeError: no host name, as the idna codec sees it
            answer.set_exception(error if isinstance(error, OSError) else OSError(str(error)))

    threading.Thread(target=look_up, name="resolve", daemon=True).start()
    return answer.result(timeout=max(deadline - time.monotonic(), 0))
