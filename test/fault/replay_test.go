//go:build unix

package fault

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

var scaleReplay = flag.Int("scale.replay", 2_000, "how many events are sent again in TestReplayAndRequeueBesideTheStream")

// Events are replayed and dead letters requeued while others are appended. The latency of the others is logged, before and with them.
func TestReplayAndRequeueBesideTheStream(t *testing.T) {
	stacktest.OnlyWith(t, "only rare installations have such sizes", "slow", "scale.replay")
	t.Parallel()
	n := *scaleReplay
	s := kit.New(t, kit.Options{Types: []string{"order", "other"}, Set: map[string]any{"log.level": "info"}})
	topics := s.ReadTopics("order")
	s.StartRelay().WaitTookOver()

	for from := 0; from < n; from += 1000 {
		var events []event.Event
		for i := from; i < min(from+1000, n); i++ {
			events = append(events, kit.NewEvent("other", fmt.Sprint("other-", i%1000), i, 60))
		}
		s.AppendEvents(s.Outbox(), events...)
	}
	stacktest.EventuallyIn(t, limitOfSize(n/100), "the first delivery of each", func() bool { return countRecordsOf(t, s, "other") == int64(n) })
	writeLetters(t, s, n)
	alone := measureLatency(t, s, topics)

	for name, command := range map[string][]string{
		"replay":  {"replay", "--from", "12h", "--aggregate-type", "other", "--yes"},
		"requeue": {"dead", "requeue", "--all", "--yes"},
	} {

		before, begin := countRecordsOf(t, s, "other"), time.Now()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if code, out, errOut := s.RunCommand(command...); code != 0 {
				t.Errorf("%v: %d\n%s%s", command, code, out, errOut)
			}
		}()

		// The slowest of several measurements counts, at least one of which overlaps with the command.
		beside := measureLatency(t, s, topics)
		for countRecordsOf(t, s, "other") < before+int64(n) {
			if time.Since(begin) > limitOfSize(n/10) {
				t.Fatalf("%v: %d records of %d after %v", command, countRecordsOf(t, s, "other")-before, n, time.Since(begin))
			}
			measured := measureLatency(t, s, topics)
			beside[0], beside[1] = max(beside[0], measured[0]), max(beside[1], measured[1])
		}
		<-ended
		t.Logf("%s of %d events: sent within %v; p50 and p99 of other events: %v before, %v meanwhile",
			name, n, time.Since(begin).Round(time.Second), alone, beside)
	}
}

// writeLetters stores n dead letters of the relay.
func writeLetters(t *testing.T, s *kit.Scene, n int) {
	t.Helper()

	for from := 0; from < n; from += 1000 {
		var list []*letters.Prepared
		for i := from; i < min(from+1000, n); i++ {
			raw, err := kit.NewEvent("other", fmt.Sprint("other-", i%1000), i, 60).MarshalBSON()
			mustSucceed(t, err)
			letter, err := letters.Prepare(letters.Letter{
				Watcher: "w", NS: s.DB.Name() + ".outbox", Raw: raw, Class: record.RecordRejected, Reason: "rejected", Partition: record.AnyPartition,
				Pos: fmt.Sprintf("82%030d", i), Origin: "stream", Source: letters.Source{Kind: "relay", Watcher: "w"},
			})
			mustSucceed(t, err)
			list = append(list, letter)
		}
		mustSucceed(t, letters.Write(t.Context(), s.State.Collection("letters"), time.Now(), list))
	}
}

// countRecordsOf returns how many records the topic of an aggregate type has.
func countRecordsOf(t *testing.T, s *kit.Scene, aggregateType string) (n int64) {
	t.Helper()
	readEnds(t, s, s.TopicOf(aggregateType)).Each(func(end kadm.ListedOffset) { n += end.Offset })
	return n
}
