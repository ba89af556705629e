import socket
import subprocess
import sys

from arealite.utils.network import free_port, host_address, interface_towards, is_free, release_port


def test_ports_are_free_and_given_once():
    ports = [free_port() for _ in range(30)]
    assert len(set(ports)) == 30 and all(map(is_free, ports))
    for port in ports:
        release_port(port)


def test_another_process_does_not_get_a_reserved_port():
    port = free_port()
    code = f"from arealite.utils.network import _reserve; print(_reserve({port}))"
    run = [sys.executable, "-c", code]
    assert subprocess.check_output(run, text=True).strip() == "False"
    release_port(port)
    assert subprocess.check_output(run, text=True).strip() == "True"


def test_a_listening_port_is_not_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_free(server.getsockname()[1])


def test_host_address_is_an_address():
    socket.inet_aton(host_address())


def test_this_machine_is_reached_without_an_interface():
    assert host_address("127.0.0.1") == "127.0.0.1" and interface_towards("localhost") == ""
    # Without a network there is none towards others either.
    assert interface_towards("192.0.2.1") in ("", *(name for _, name in socket.if_nameindex()))
