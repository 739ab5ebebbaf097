package sink

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// forge writes one record with the producer id, the epoch and the next sequence of r, as any client can that may read and write
// the topic.
func forge(t *testing.T, r *testSink, topic string, timeMS int64) {
	t.Helper()
	r.mu.Lock()
	sender, seq := r.producer, r.topics[topic].partitions[0].nextSeq
	r.mu.Unlock()

	rec := newRecord(topic, "k", "FORGED")
	rec.TimeMS = timeMS
	var b batch.Builder
	b.Reset(new(batch.Chunks))
	b.Append(&rec)
	if err := b.Seal(batch.None(), sender, seq); err != nil {
		t.Fatal(err)
	}

	cl, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(t)...), kgo.MaxVersions(kversion.V2_4_0()))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	req := kmsg.NewPtrProduceRequest()
	req.Acks, req.TimeoutMillis = -1, 5000
	p := kmsg.NewProduceRequestTopicPartition()
	p.Records = slices.Concat(b.AppendPieces(nil)...)[4:]
	rt := kmsg.NewProduceRequestTopic()
	rt.Topic, rt.Partitions = topic, append(rt.Partitions, p)
	req.Topics = append(req.Topics, rt)

	resp, err := req.RequestWith(t.Context(), cl)
	if err != nil {
		t.Fatal(err)
	}
	if code := resp.Topics[0].Partitions[0].ErrorCode; code != 0 {
		t.Fatalf("Kafka rejects the forged batch with code %d", code)
	}
}

// TestForeignBatchIsNotTakenForOurs: another client has written a batch with the identity and the next sequence of the relay,
// so Kafka acknowledges the relay's next batch as a repetition, without appending it. The sink ends, and the next one sends it.
func TestForeignBatchIsNotTakenForOurs(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		config kafka.ConfigEntry
		timeMS int64
		idle   bool // the sink has looked at the end of the partition since
	}{
		"at once":              {timeMS: time.Now().UnixMilli()},
		"without a time, idle": {timeMS: -1, idle: true},
		"time of the broker, idle": {
			config: kafka.ConfigEntry{ConfigName: "message.timestamp.type", ConfigValue: "LogAppendTime"}, timeMS: 1, idle: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			topic := stacktest.Name(t)
			var configs []kafka.ConfigEntry
			if c.config.ConfigName != "" {
				configs = append(configs, c.config)
			}
			stacktest.CreateTopic(t, topic, 1, configs...)
			txid, claims := "outrelay.test."+stacktest.Name(t), &claims{}
			r := openSink(t, sinkOptions{txid: txid, claims: claims})
			r.EndReread()
			r.send(t, newRecord(topic, "k", "k/0"))
			r.Flush()
			r.acks.waitResolved(1)

			forge(t, r, topic, c.timeMS)
			if c.idle {
				r.refreshIdleOffsets(t.Context(), r.refresher.openTopicNames())
			}
			r.send(t, newRecord(topic, "k", "k/1"))
			r.Flush()
			if err := r.waitEnded(t); !errors.Is(err, ErrBroken) || !strings.Contains(err.Error(), "WRITE") {
				t.Errorf("the sink ended with %v, want ErrBroken with the cause and the remedy", err)
			}

			second := openSink(t, sinkOptions{txid: txid, claims: claims})
			second.send(t, newRecord(topic, "k", "k/0"))
			second.send(t, newRecord(topic, "k", "k/1"))
			second.Flush()
			second.acks.waitResolved(2)
			got := valuesOf(readTopic(t, stacktest.Brokers(t), topic))[0]
			if want := []string{"k/0", "FORGED", "k/1"}; !slices.Equal(got, want) {
				t.Errorf("the topic has %v, want %v", got, want)
			}
			if tp := (record.TopicPartition{Topic: topic}); len(second.acks.restored[tp]) != 1 {
				t.Errorf("restored %v, want once", second.acks.restored[tp])
			}
		})
	}
}
