package fence

import (
	"strings"
	"testing"
)

// TestN04_AForeignBatchFencesItsPartition: another client writes with the producer id of the relay and an epoch above all
// epochs of the relay, so Kafka accepts no marker of that id in the partition any more. That batch itself fences the earlier
// owner. The relay leaves the id, and reports the cause.
func TestN04_AForeignBatchFencesItsPartition(t *testing.T) {
	t.Parallel()
	for name, epoch := range map[string]int16{"highest epoch": 32767, "higher epoch": 1000} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newClient(t)
			topic := newTopic(t, c, 2)
			o := newOwner(t, topic, 2)
			first := o.takeAll(t, c)
			mustSend(t, c, at(topic, 0), encodeBatch(0, first.Producer, 0, newRecords("own")...))
			mustSend(t, c, at(topic, 1), encodeBatch(0, first.Producer, 0, newRecords("other")...))
			mustSend(t, c, at(topic, 0), encodeBatch(0, Producer{ID: first.Producer.ID, Epoch: epoch}, 0, newRecords("foreign")...))

			second := o.takeAll(t, c, func(in *In) { in.Stuck = oldTotal })
			if second.Producer.ID == first.Producer.ID {
				t.Errorf("the relay continues with %v, which partition 0 does not accept", second.Producer)
			}
			if tail := second.Released[at(topic, 0)]; tail == nil || !tail.Hits.Has(mustIdentify(t, newHeader("id", "own")), AnyTime) {
				t.Error("the record of the earlier owner was not read back")
			}
			checkZombieRejected(t, c, at(topic, 0), first.Producer, 1)
			checkZombieRejected(t, c, at(topic, 1), first.Producer, 1)
			for p := range 2 {
				mustSend(t, c, at(topic, p), encodeBatch(0, second.Producer, 0, newRecords("next")...))
			}

			text := ""
			for _, e := range o.events {
				if e.Kind == ForeignProducer && e.Topic == topic {
					text = e.Text
				}
			}
			if !strings.Contains(text, "WRITE") || !strings.Contains(text, topic+"-0") {
				t.Errorf("the cause was not reported with the partition and the remedy: %q in %v", text, o.events)
			}
		})
	}
}
