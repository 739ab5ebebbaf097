package devstack

import (
	"net"
	"testing"
)

// A port that was chosen is chosen by no other call, although no process listens on it, and a server can listen on it.
func TestChosenPortsAreReserved(t *testing.T) {
	t.Parallel()
	ports, err := freePorts(3)
	if err != nil {
		t.Fatal(err)
	}

	for _, port := range ports {
		if reservePort(port) {
			t.Errorf("port %d was chosen twice", port)
		}
		listener, err := net.Listen("tcp", loopback(port))
		if err != nil {
			t.Errorf("no server can use port %d: %v", port, err)
			continue
		}
		_ = listener.Close()
	}
}
