package devstack

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// Ports are chosen below the range that systems use for outgoing connections (from 32768 on Linux, and from 49152
// elsewhere). Otherwise the connection of a client could use the port of a stopped member, and the member could not
// restart on its address.
const lowestPort, highestPort = 15000, 32000

// errPortTaken is the error when another process took a port after its choice and before the start of the member.
var errPortTaken = errors.New("port taken by another process")

// freePorts returns n loopback ports on which no process listens. Until this process ends, no other call returns them, also not in another
// process of this machine: a server may need seconds until it listens, and a stopped member needs its port again.
func freePorts(n int) ([]int, error) {
	ports := make([]int, 0, n)
	seen := map[int]bool{}
	for range 1000 {
		if len(ports) == n {
			return ports, nil
		}

		// Random ports make collisions of concurrent tests rare.
		port := lowestPort + rand.IntN(highestPort-lowestPort)
		if seen[port] {
			continue
		}
		seen[port] = true

		if !reservePort(port) {
			continue
		}
		listener, err := net.Listen("tcp", loopback(port))
		if err != nil {
			continue
		}
		_ = listener.Close()
		ports = append(ports, port)
	}
	return nil, fmt.Errorf("cannot find %d free loopback ports between %d and %d", n, lowestPort, highestPort)
}

// reserved keeps the sockets of [reservePort] open until the process ends.
var reserved struct {
	sync.Mutex
	sockets []net.PacketConn
}

// reservePort reports whether no process has reserved the port before. The reservation is the UDP socket with the number of the port: the
// kernel gives it to one process and takes it back when this process ends, and no server needs it.
func reservePort(port int) bool {
	socket, err := net.ListenPacket("udp", loopback(port))
	if err != nil {
		return false
	}

	reserved.Lock()
	defer reserved.Unlock()
	reserved.sockets = append(reserved.sockets, socket)
	return true
}

// FreeAddress returns a loopback address on which no process listens now. The system does not use its port for
// outgoing connections, and no other call of this package returns it. So a process can start to listen there, stop, and start again.
func FreeAddress() (string, error) {
	ports, err := freePorts(1)
	if err != nil {
		return "", err
	}
	return loopback(ports[0]), nil
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// portTaken returns errPortTaken if a process listens on one of the ports. The member of these ports must have
// ended.
func portTaken(ports []int) error {
	for _, p := range ports {
		listener, err := net.Listen("tcp", loopback(p))
		if err != nil {
			return fmt.Errorf("%s: %w", loopback(p), errPortTaken)
		}
		_ = listener.Close()
	}
	return nil
}
