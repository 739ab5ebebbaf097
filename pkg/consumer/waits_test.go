package consumer_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// cutNetwork is the network of a member, which a test can cut.
type cutNetwork struct {
	mu   sync.Mutex
	open []net.Conn
	down bool
}

func (n *cutNetwork) dial(ctx context.Context, network, address string) (net.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		return nil, net.ErrClosed
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err == nil {
		n.open = append(n.open, conn)
	}
	return conn, err
}

// setDown cuts or restores the network. All connections end.
func (n *cutNetwork) setDown(down bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.down = down
	for _, conn := range n.open {
		_ = conn.Close()
	}
	n.open = nil
}

const assignedLine, waitingLine = "partitions are assigned", "waiting for the group"

// A member that has had partitions logs why it waits, like one that has just been started.
func TestTheLogShowsWhyAMemberWaitsOnceMore(t *testing.T) {
	t.Parallel()
	k := newKit(t, 2)
	stays, dies, joins := &logbook{}, &logbook{}, &logbook{}
	k.start(k.newLogged(t, stays))
	network := &cutNetwork{}
	k.cfg.Dial = network.dial
	k.start(k.newLogged(t, dies))
	k.waitUntil("two members", func(context.Context) bool {
		return stays.find(t, assignedLine) != nil && dies.find(t, assignedLine) != nil
	})

	// The group forms again for the third member, and waits for the one that has died.
	before := stays.count(t, assignedLine)
	network.setDown(true)
	k.cfg.Dial = nil
	k.start(k.newLogged(t, joins))
	k.waitUntil("the reason", func(context.Context) bool { return stays.find(t, waitingLine) != nil })
	k.waitUntil("the assignment", func(context.Context) bool { return stays.count(t, assignedLine) > before })
	if line := stays.find(t, waitingLine); line["members"] == nil || line["at_most"] == nil {
		t.Errorf("unexpected line %v", line)
	}
}

// After an outage of Kafka, a member is in its group at once. The group does not wait until the session of its former id has ended.
func TestAMemberIsBackSoonAfterAnOutage(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.cfg.SessionTimeout, k.cfg.RebalanceTimeout = time.Minute, time.Minute
	network, book := &cutNetwork{}, &logbook{}
	k.cfg.Dial = network.dial
	k.start(k.newLogged(t, book))
	k.waitUntil("the assignment", func(context.Context) bool { return book.find(t, assignedLine) != nil })

	network.setDown(true)
	k.waitUntil("the outage", func(context.Context) bool { return book.find(t, "a request to Kafka failed; it is repeated") != nil })
	if line := book.find(t, waitingLine); line != nil {
		t.Errorf("Kafka is away, and the log has %v", line)
	}
	network.setDown(false)
	stacktest.EventuallyIn(t, 30*time.Second, "the member is back", func() bool { return book.count(t, assignedLine) > 1 }, func() any { return book.read() })
}
