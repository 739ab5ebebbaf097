package model

import (
	"slices"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
)

// sent is a record in the queue of a sink, on its way, or in a log.
type sent struct {
	number      int // of the event, which is the value of the record
	ns, key     string
	rec         record.Record
	ticket      record.Ticket
	bytes       int
	id          fence.Identity
	redelivered bool
	inDoubt     bool // a request with it had no response
}

// entry is a record or a marker of a log.
type entry struct {
	*sent
	epoch  int16
	marker bool
}

// log is the log of a partition.
type log struct {
	tp      record.TopicPartition
	entries []entry
	leader  bool
	fence   int16 // of the latest marker: Kafka rejects lower epochs (N4)
	claimed int16 // of the latest owner that was released here
}

func (l *log) end() int64 { return int64(len(l.entries)) }

// request is a produce request that is on its way. An owner that dies leaves it there.
type request struct {
	sink    *sink
	part    *partition
	epoch   int16
	records []*sent

	arrived  bool // its response is on the way
	base     int64
	rejected int // index of the record that Kafka rejects, or -1
	isFenced bool
}

// marker is a marker of a barrier that is on its way.
type marker struct {
	log   *log
	epoch int16
}

// kafka has the logs, and the requests and markers that are on their way.
type kafka struct {
	logs     map[record.TopicPartition]*log
	parts    []record.TopicPartition // sorted
	requests []*request
	markers  []marker
	epoch    int16 // of the transactional id
}

// topics are the topics of the model with their numbers of partitions. Events of "both" go to a and b.
var topics = map[string]int{"a": 2, "b": 1}

func newKafka() *kafka {
	k := &kafka{logs: map[record.TopicPartition]*log{}}
	for _, topic := range []string{"a", "b"} {
		for p := range topics[topic] {
			tp := record.TopicPartition{Topic: topic, Partition: int32(p)}
			k.logs[tp] = &log{tp: tp, leader: true}
			k.parts = append(k.parts, tp)
		}
	}
	return k
}

// arrive lets the request arrive at its leader. A request to a partition without a leader stays on its way: it arrives later.
func (w *world) arrive(r *request) {
	l := w.kafka.logs[r.part.tp]
	if r.arrived || !l.leader {
		return
	}
	r.arrived, r.rejected = true, -1
	if r.epoch < l.fence {
		r.isFenced = true
		w.logf("%v rejects a request of epoch %d", l.tp, r.epoch)
		return
	}

	for i, record := range r.records {
		spec := w.specs[record.number]
		if spec.rejections[l.tp.Topic] > 0 {
			spec.rejections[l.tp.Topic]--
			r.rejected = i
			w.logf("%v rejects %s", l.tp, spec)
			return
		}
	}
	r.base = l.end()
	for _, record := range r.records {
		w.checkAppend(l, record, r)
		l.entries = append(l.entries, entry{sent: record, epoch: r.epoch})
	}
	w.logf("%v gets %s of epoch %d at %d", l.tp, w.names(r.records), r.epoch, r.base)
}

// response lets the response of a request arrive at its sink.
func (w *world) response(r *request) {
	if !r.arrived {
		return
	}
	w.kafka.requests = slices.DeleteFunc(w.kafka.requests, func(other *request) bool { return other == r })
	r.sink.settle(r)
}

// land writes a marker that is on its way into its log (H4).
func (w *world) land(i int) {
	m := w.kafka.markers[i]
	if !m.log.leader {
		return
	}
	w.kafka.markers = slices.Delete(w.kafka.markers, i, i+1)
	if m.epoch < m.log.fence {
		return
	}
	m.log.fence = m.epoch
	m.log.entries = append(m.log.entries, entry{epoch: m.epoch, marker: true})
	w.logf("%v gets the marker of epoch %d", m.log.tp, m.epoch)
}
