package demo

import (
	"io"
	"net"
	"testing"
	"time"
)

// Bytes arrive through the proxy after the delay of both directions, complete, and at the rate at which they
// were sent.
func TestFarIsAway(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()

	f, err := newDelayProxy(l.Addr().String(), 20*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	defer f.closeAll()
	c, err := net.Dial("tcp", f.listenAddress())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	sent := make([]byte, 1<<20)
	for i := range sent {
		sent[i] = byte(i * 7)
	}

	began := time.Now()
	go func() { _, _ = c.Write(sent) }()
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(c, got); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took < 40*time.Millisecond {
		t.Errorf("there and back in %v", took)
	}

	for i := range sent {
		if got[i] != sent[i] {
			t.Fatalf("byte %d differs", i)
		}
	}
}
