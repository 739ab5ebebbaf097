package process_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestN08_RecordsInAQuarantinedPartitionAreFoundLater: an owner has sent an envelope outside of the stream's order
// and has not recorded that. Its partition has no leader when the second owner takes over. When the partition has a
// leader, that owner takes over again and records the envelope, whose turn has not come. It is not sent again.
func TestN08_RecordsInAQuarantinedPartitionAreFoundLater(t *testing.T) {
	t.Parallel()
	s := stacktest.Own(t, devstack.Options{Brokers: 3, Quick: true, Kafka: devstack.KafkaOptions{Props: map[string]string{"broker.session.timeout.ms": "3000"}}})
	b := setup(t)
	brokers := "kafka.brokers=" + strings.Join(s.Brokers(), ",")
	cl := &kafka.Client{Addr: kafka.TCP(s.Brokers()...), Transport: &kafka.Transport{MetadataTTL: 100 * time.Millisecond}, Timeout: 10 * time.Second}
	t.Cleanup(cl.Transport.(*kafka.Transport).CloseIdleConnections)
	topic := kafka.TopicConfig{Topic: b.topic, NumPartitions: -1, ReplicationFactor: -1, ReplicaAssignments: []kafka.ReplicaAssignment{{Partition: 0, Replicas: []int{3}}}}
	// A controller may consider a live broker dead, and a response may be so late that the client sends the request twice.
	stacktest.Eventually(t, "the topic exists", func() bool {
		res, err := cl.CreateTopics(t.Context(), &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{topic}})
		return err == nil && (res.Errors[b.topic] == nil || errors.Is(res.Errors[b.topic], kafka.TopicAlreadyExists))
	})

	stored := func() bson.RawValue {
		raw, err := b.state.Collection("watchers").FindOne(t.Context(), bson.D{}).Raw()
		if errors.Is(err, mongo.ErrNoDocuments) {
			// No process has acquired the lease yet.
			return bson.RawValue{}
		}
		if err != nil {
			t.Fatal(err)
		}
		return raw.Lookup("offsets", "0", "p", "0")
	}
	first := b.start(brokers)
	b.append(1, event.WithID("late"))
	stacktest.Eventually(t, "the offset of the envelope is stored", func() bool { at, ok := stored().AsInt64OK(); return ok && at > 0 })
	if err := first(); err != nil {
		t.Fatal(err)
	}
	b.sentBeside("late")

	sick := s.Kafkas()[2]
	if err := sick.Pause(); err != nil {
		t.Fatal(err)
	}
	awake := false
	wake := func() {
		if !awake {
			awake = true
			if err := sick.Resume(); err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(wake)
	stacktest.Eventually(t, "the partition has no leader", func() bool {
		m, err := cl.Metadata(t.Context(), &kafka.MetadataRequest{Topics: []string{b.topic}})
		return err == nil && len(m.Topics) == 1 && len(m.Topics[0].Partitions) == 1 && m.Topics[0].Partitions[0].Leader.Host == ""
	})
	before := b.log.countLines("took over")
	second := b.start(brokers)
	stacktest.Eventually(t, "the second relay has taken over", func() bool { return b.log.countLines("took over") > before })
	wake()
	b.log.wait(t, "in quarantine can be read back")
	stacktest.Eventually(t, "the second relay has taken over again", func() bool { return b.log.countLines("took over") > before+1 })
	// No partition in quarantine holds the offset back.
	stacktest.Eventually(t, "the offset is stored again", func() bool { at, _ := stored().AsInt64OK(); return at > 0 })
	if err := second(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.state.Collection("waiting").UpdateOne(t.Context(), bson.D{{Key: "id", Value: "late"}, {Key: "reason", Value: "retry"}},
		bson.D{{Key: "$set", Value: bson.D{{Key: "nextAt", Value: time.Now()}}}}); err != nil {
		t.Fatal(err)
	}
	b.start(brokers)
	stacktest.Eventually(t, "no envelope waits", func() bool {
		return b.countWaiting(bson.D{}) == 0
	})
	b.append(1, event.WithID("last"))
	if n := b.countBefore("last", s.Brokers()); n != 1 {
		t.Fatalf("the envelope was sent %d times", n)
	}
}

func (l *lines) countLines(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.buf.String(), text)
}

// countBefore counts the records of the topic before the record of an envelope.
func (b *bundle) countBefore(id string, brokers []string) (n int) {
	b.t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.ConsumeTopics(b.topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		b.t.Fatal(err)
	}
	defer cl.Close()
	for records := b.poll(cl); records != nil; records = b.poll(cl) {
		for _, r := range records {
			if string(r.Headers[0].Value) == id {
				return n
			}
			n++
		}
	}

	b.t.Fatalf("the record of %s never arrived, but %d others", id, n)
	return n
}

// sentBeside leaves the state of an owner that died after it had sent an envelope outside of the stream's order: the
// envelope waits for a later time, and its record is above the stored offset.
func (b *bundle) sentBeside(id string) {
	b.t.Helper()
	b.enterWaiting(id, "82", func(e *waiting.Entry) {
		e.Reason, e.NextAt, e.Attempts, e.Pending = waiting.Retry, time.Now().Add(time.Hour), 1, []string{b.topic}
		// The record came out of the stream.
		e.StreamMS = fence.AnyTime
	})
	if _, err := b.state.Collection("watchers").UpdateOne(b.t.Context(), bson.D{}, bson.D{
		{Key: "$set", Value: bson.D{{Key: "offsets.0.p.0", Value: int64(0)}}},
	}); err != nil {
		b.t.Fatal(err)
	}
}
