package devstack

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
)

// Ports are taken below the range from which systems give outgoing connections theirs (32768 and up
// on Linux, 49152 elsewhere): else a client's connection could sit on the port of a member that is
// down, and the member could not come back to its address.
const lowestPort, highestPort = 15000, 32000

// errPortTaken is a port that another process took between the choice and the member's start.
var errPortTaken = errors.New("port taken by another process")

// freePorts finds n loopback ports on which nobody listens.
func freePorts(n int) ([]int, error) {
	ports := make([]int, 0, n)
	seen := map[int]bool{}
	for range 1000 {
		if len(ports) == n {
			return ports, nil
		}
		p := lowestPort + rand.IntN(highestPort-lowestPort)
		if seen[p] {
			continue
		}
		seen[p] = true
		l, err := net.Listen("tcp", loopback(p))
		if err != nil {
			continue
		}
		_ = l.Close()
		ports = append(ports, p)
	}
	return nil, fmt.Errorf("no %d free loopback ports between %d and %d", n, lowestPort, highestPort)
}

// FreeAddress is a loopback address on which nobody listens now, and which the system gives to no connection: for a process
// that is started to listen there, or that may leave it and come back.
func FreeAddress() (string, error) {
	ports, err := freePorts(1)
	if err != nil {
		return "", err
	}
	return loopback(ports[0]), nil
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// portTaken is errPortTaken if somebody listens on one of the ports. It is asked about a member that
// has ended.
func portTaken(ports []int) error {
	for _, p := range ports {
		l, err := net.Listen("tcp", loopback(p))
		if err != nil {
			return fmt.Errorf("%s: %w", loopback(p), errPortTaken)
		}
		_ = l.Close()
	}
	return nil
}
