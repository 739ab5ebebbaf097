package consumer

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"
)

const (
	apiEpochEnd     = 23 // OffsetForLeaderEpoch
	versionEpochEnd = 3
)

// checkEpoch reports records that a new leader lost after they had been read, when it has others at their offsets by now: their
// leader epoch is higher, and the leader says where the epoch before ended (KIP-320). The error is a *RangeError.
func (g *generation) checkEpoch(ctx context.Context, w *walker) error {
	before, ok := g.epochs.Load(w.tp)
	if ok && w.first > before.(int32) {
		end, err := g.epochEnd(ctx, w.tp, before.(int32))
		if err != nil {
			return fmt.Errorf("asking for the end of a leader epoch of partition %s: %w", w.tp, err)
		}
		if end >= 0 && end < w.from {
			start, _, err := g.edge(ctx, w.tp, kafka.FirstOffset)
			if err != nil {
				return err
			}
			return &RangeError{TopicPartition: w.tp, Offset: w.from, Start: min(start, end), End: end, Diverged: true}
		}
	}
	if w.last >= 0 {
		g.epochs.Store(w.tp, w.last)
	}
	return nil
}

// epochRequest asks the leader of a partition for the end of an epoch. kafka-go does not know this request; it finds the leader
// as for a fetch.
type epochRequest struct {
	*fetch.Request
	tp    TopicPartition
	epoch int32
}

// epochAnswer is the offset behind the epoch; -1 if the broker does not know it.
type epochAnswer struct {
	fetch.Response
	end int64
}

func (g *generation) epochEnd(ctx context.Context, tp TopicPartition, epoch int32) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	route := &fetch.Request{Topics: []fetch.RequestTopic{{Topic: tp.Topic, Partitions: []fetch.RequestPartition{{Partition: tp.Partition}}}}}
	m, err := g.fetches.RoundTrip(ctx, g.addr, &epochRequest{Request: route, tp: tp, epoch: epoch})
	if err != nil {
		if ctx.Err() == nil {
			g.refresh(ctx)
		}
		return 0, err
	}
	answer, ok := m.(*epochAnswer)
	if !ok {
		return 0, errAnswer
	}
	return answer.end, nil
}

// Required makes kafka-go leave the exchange to RawExchange.
func (*epochRequest) Required(map[protocol.ApiKey]int16) bool { return true }

// RawExchange asks which versions the broker supports, and then for the epoch.
func (x *epochRequest) RawExchange(rw io.ReadWriter) (protocol.Message, error) {
	versions, err := call(rw, apiVersions, 0, nil)
	if err != nil {
		return nil, err
	}
	if !supports(versions, apiEpochEnd, versionEpochEnd) {
		return &epochAnswer{end: -1}, nil
	}

	// No replica's id, and one topic with one partition, whose current leader epoch (-1) is not checked.
	be := binary.BigEndian
	body := be.AppendUint32(be.AppendUint32(nil, 0xffffffff), 1)
	body = be.AppendUint16(body, uint16(len(x.tp.Topic)))
	body = be.AppendUint32(append(body, x.tp.Topic...), 1)
	body = be.AppendUint32(body, uint32(x.tp.Partition))
	body = be.AppendUint32(be.AppendUint32(body, 0xffffffff), uint32(x.epoch))
	answer, err := call(rw, apiEpochEnd, versionEpochEnd, body)
	if err != nil {
		return nil, err
	}

	r := wire{b: answer}
	r.u32() // throttle time
	topics := r.u32()
	r.take(int(r.u16()))
	partitions := r.u32()
	code := kafka.Error(int16(r.u16()))
	r.u32() // partition
	r.u32() // epoch
	end := int64(r.u32())<<32 | int64(r.u32())
	switch {
	case r.bad || topics != 1 || partitions != 1:
		return nil, errAnswer
	case code != 0:
		return nil, code
	}
	return &epochAnswer{end: end}, nil
}
