package process_test

import (
	"net"
	"slices"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/pkg/event"
)

// listenMute accepts connections and never responds, as a stopped broker does. It returns its address.
func listenMute(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}

	var conns []net.Conn
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns = append(conns, c)
		}
	}()

	t.Cleanup(func() {
		l.Close()
		<-done
		for _, c := range conns {
			c.Close()
		}
	})

	return l.Addr().String()
}

// TestFirstPositionIsSavedBeforeKafkaResponds: a process that begins at "now" and cannot reach Kafka must not let the next one
// begin at a later now.
func TestFirstPositionIsSavedBeforeKafkaResponds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.env = slices.DeleteFunc(b.env, func(s string) bool { return strings.HasPrefix(s, "OUTRELAY_KAFKA") })
	b.env = append(b.env, "OUTRELAY_KAFKA_BROKERS="+listenMute(t))
	stop := b.start("start=now", longDrain, "kafka.request_timeout=5m")
	stacktest.Eventually(t, "the first position is saved", func() bool {
		var doc struct {
			ClusterTime bson.Timestamp `bson:"clusterTime"`
		}
		return b.state.Collection("watchers").FindOne(t.Context(), bson.D{}).Decode(&doc) == nil && doc.ClusterTime.T > 0
	})

	// A mute broker must not end the heartbeat of the node.
	stacktest.Eventually(t, "the node is listed although the broker is mute", func() bool {
		n, err := b.state.Collection("nodes").CountDocuments(t.Context(), bson.D{})
		return err == nil && n == 1
	})

	// A stop waits for no response of Kafka.
	if err := stop(); err != nil {
		t.Fatal(err)
	}
}

// A pause ends a halt. The lag is unknown during both: events may wait, and nothing measures their age.
func TestAPauseEndsAHalt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1)
	var relay *process.Relay
	b.startAs(func(r *process.Relay) { relay = r }, "invalidate=halt")
	b.consume(1)
	isLagKnown := func(known bool) func() bool {
		return func() bool {
			return (b.status().LagS != nil) == known && relay.HasSeries(t, "outrelay_lag_seconds") == known
		}
	}
	stacktest.Eventually(t, "the lag is known", isLagKnown(true))
	if err := b.db.Collection("outbox").Drop(t.Context()); err != nil {
		t.Fatal(err)
	}

	b.log.wait(t, "part=halted")
	stacktest.Eventually(t, "the lag of the halted slot is unknown", isLagKnown(false))
	if err := lease.Pause(t.Context(), b.state.Collection("watchers"), "default/0of1", "ann"); err != nil {
		t.Fatal(err)
	}

	stacktest.Eventually(t, "the watcher has no owner", func() bool { return b.status().Owner == "" })
	if !isLagKnown(false)() {
		t.Errorf("the lag of a paused slot is known: %+v", b.status())
	}
}

// TestARestartDoesNotForgetTheHalt: after a halt over a vanished document, a restart must not begin after envelopes
// that were never delivered.
func TestARestartDoesNotForgetTheHalt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1)
	stop := b.start()
	b.consume(1)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.state.Collection("watchers").DeleteMany(t.Context(), bson.D{}); err != nil {
		t.Fatal(err)
	}

	for range 2 {
		stop = b.start("start=now")
		stacktest.Eventually(t, "the restarted relay is halted", func() bool {
			n, err := b.state.Collection("watchers").CountDocuments(t.Context(), bson.D{})
			return err == nil && n == 1 && b.status().State == "halted"
		})
		if err := stop(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestAStopDoesNotWaitForAMissingTopic: what cannot be sent is no reason to keep the lease for the whole drain time.
func TestAStopDoesNotWaitForAMissingTopic(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stop := b.start(longDrain)
	b.log.wait(t, "took over")
	b.append(1, event.WithTopic("missing-"+b.topic))
	stacktest.Eventually(t, "the missing topic cannot be written", func() bool {
		w := b.status()
		return w.State == "unwritable" && len(w.Unwritable) == 1 && w.Unwritable[0].Count == 1
	})
	if err := stop(); err != nil {
		t.Fatal(err)
	}
}
