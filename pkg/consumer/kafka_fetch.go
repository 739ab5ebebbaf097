package consumer

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/compress"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"
	"github.com/segmentio/kafka-go/protocol/listoffsets"
	"github.com/segmentio/kafka-go/protocol/metadata"
)

// exchange is a fetch whose answer is read here: kafka-go's decoder loses a batch's last offset, without which a compacted
// log cannot be walked, and does not leave out the records of aborted transactions.
type exchange struct {
	*fetch.Request
	client  string
	version int16
}

var correlation atomic.Int32

// Required asks kafka-go to leave the exchange to us; it gets the versions that the connection has negotiated.
func (x *exchange) Required(versions map[protocol.ApiKey]int16) bool {
	x.version = versions[protocol.Fetch]
	return true
}

// RawExchange writes the request and reads the answer. Nobody else uses the connection meanwhile.
func (x *exchange) RawExchange(rw io.ReadWriter) (protocol.Message, error) {
	if x.version < 4 || x.version > 11 {
		return nil, fmt.Errorf("fetch version %d: the broker must speak 4 to 11 (Kafka 0.11 or later)", x.version)
	}
	if err := protocol.WriteRequest(rw, x.version, correlation.Add(1), x.client, x.Request); err != nil {
		return nil, err
	}
	var head [8]byte
	if _, err := io.ReadFull(rw, head[:]); err != nil {
		return nil, fmt.Errorf("reading the answer: %w", err)
	}
	size := int(int32(binary.BigEndian.Uint32(head[:]))) - 4
	if size < 0 || size > maxAnswer {
		return nil, fmt.Errorf("reading the answer: impossible size %d", size)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(rw, body); err != nil {
		return nil, fmt.Errorf("reading the answer: %w", err)
	}
	return parseAnswer(body, x.version)
}

// maxAnswer is far above what is asked for: a single batch is sent whole whatever its size.
const maxAnswer = 512 << 20

// answer is a fetch's answer for its one partition.
type answer struct {
	code       int16
	stable     int64 // last stable offset
	start      int64 // of the log; -1 unknown
	aborted    []abortedTx
	set        []byte
	hasContent bool
}

type abortedTx struct{ producer, first int64 }

// ApiKey makes it a message of kafka-go.
func (*answer) ApiKey() protocol.ApiKey { return protocol.Fetch } //nolint:revive,staticcheck // the name is kafka-go's

func parseAnswer(body []byte, v int16) (*answer, error) {
	d := wire{b: body}
	d.skip(4) // throttle
	if v >= 7 {
		if code := d.i16(); code != 0 {
			return nil, kafka.Error(code)
		}
		d.skip(4) // session
	}
	out := &answer{start: -1}
	for range d.count() {
		d.bytes(int(d.i16())) // topic
		for range d.count() {
			d.skip(4) // partition
			out.hasContent = true
			out.code = d.i16()
			d.skip(8) // high watermark
			out.stable = d.i64()
			if v >= 5 {
				out.start = d.i64()
			}
			for range d.count() {
				out.aborted = append(out.aborted, abortedTx{d.i64(), d.i64()})
			}
			if v >= 11 {
				d.skip(4) // preferred replica
			}
			out.set = d.bytes(int(d.i32()))
		}
	}
	if d.bad || !out.hasContent {
		return nil, errors.New("reading the answer: it ends too early")
	}
	return out, nil
}

// Fetch reads committed records of one partition.
func (g *generation) Fetch(ctx context.Context, tp TopicPartition, offset int64, maxBytes int) (Fetched, error) {
	ctx, cancel := context.WithTimeout(ctx, g.cfg.MaxWait+requestTimeout)
	defer cancel()
	m, err := g.fetches.RoundTrip(ctx, g.addr, &exchange{client: g.cfg.ClientID, Request: &fetch.Request{
		ReplicaID: -1, MaxWaitTime: int32(g.cfg.MaxWait / time.Millisecond), MinBytes: 1, MaxBytes: int32(maxBytes), SessionEpoch: -1,
		IsolationLevel: int8(kafka.ReadCommitted),
		Topics: []fetch.RequestTopic{{Topic: tp.Topic, Partitions: []fetch.RequestPartition{{
			Partition: tp.Partition, CurrentLeaderEpoch: -1, FetchOffset: offset, LogStartOffset: -1, PartitionMaxBytes: int32(maxBytes),
		}}}},
	}})
	if err != nil {
		if ctx.Err() == nil {
			g.refresh(ctx)
		}
		return Fetched{}, err
	}
	a, ok := m.(*answer)
	if !ok {
		return Fetched{}, fmt.Errorf("an answer of type %T to a fetch", m)
	}
	switch kafka.Error(a.code) {
	case 0:
	case kafka.OffsetOutOfRange:
		return Fetched{}, g.outOfRange(ctx, tp, offset)
	default:
		g.refresh(ctx)
		return Fetched{}, kafka.Error(a.code)
	}
	w := walker{tp: tp, from: offset, next: offset, aborted: a.aborted}
	if err := w.walk(a.set); err != nil {
		return Fetched{}, err
	}
	return Fetched{Records: w.out, Next: w.next, End: max(a.stable, w.next)}, nil
}

// outOfRange finds out what the partition has instead.
func (g *generation) outOfRange(ctx context.Context, tp TopicPartition, offset int64) error {
	start, _, err := g.edge(ctx, tp, kafka.FirstOffset)
	if err != nil {
		return err
	}
	end, _, err := g.edge(ctx, tp, kafka.LastOffset)
	if err != nil {
		return err
	}
	if offset >= start && offset <= end {
		return kafka.OffsetOutOfRange // a replica that is behind answered: asked again
	}
	return &RangeError{TopicPartition: tp, Offset: offset, Start: start, End: end}
}

// edge asks the leader for one end of the partition and its epoch.
func (g *generation) edge(ctx context.Context, tp TopicPartition, at int64) (int64, int32, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	m, err := g.fetches.RoundTrip(ctx, g.addr, &listoffsets.Request{ReplicaID: -1, Topics: []listoffsets.RequestTopic{{
		Topic: tp.Topic, Partitions: []listoffsets.RequestPartition{{Partition: tp.Partition, CurrentLeaderEpoch: -1, Timestamp: at}},
	}}})
	if err != nil {
		if ctx.Err() == nil {
			g.refresh(ctx)
		}
		return 0, -1, err
	}
	res, ok := m.(*listoffsets.Response)
	if !ok || len(res.Topics) != 1 || len(res.Topics[0].Partitions) != 1 {
		return 0, -1, errors.New("an answer without the partition")
	}
	p := res.Topics[0].Partitions[0]
	if p.ErrorCode != 0 {
		g.refresh(ctx)
		return 0, -1, kafka.Error(p.ErrorCode)
	}
	return p.Offset, p.LeaderEpoch, nil
}

func (g *generation) refresh(ctx context.Context) { refreshLayout(ctx, g.fetches, g.addr) }

// refreshLayout makes kafka-go read the cluster's layout anew: until then it dials leaders that are gone. A request for a
// name that no topic can have always ends in a refresh and never creates anything.
func refreshLayout(ctx context.Context, t *kafka.Transport, addr net.Addr) {
	_, _ = t.RoundTrip(ctx, addr, &metadata.Request{TopicNames: []string{"/"}, AllowAutoTopicCreation: true})
}

const batchHeader = 61

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// walker takes a record set apart.
type walker struct {
	tp      TopicPartition
	from    int64
	next    int64
	aborted []abortedTx // by first offset
	dropped map[int64]struct{}
	out     []Record
}

// walk goes through the batches. The next offset after one comes from its last offset delta: a compacted batch ends with a
// hole, and a marker is one (N29).
func (w *walker) walk(set []byte) error {
	for len(set) > 16 {
		size := 12 + int(int32(binary.BigEndian.Uint32(set[8:])))
		if size < 12 || size > len(set) {
			return nil // cut off by the size of the fetch: the next one brings it whole
		}
		if err := w.batch(set[:size]); err != nil {
			if len(w.out) > 0 {
				return nil // what came before is good; the next fetch begins with this one
			}
			return err
		}
		set = set[size:]
	}
	return nil
}

func (w *walker) batch(b []byte) error {
	be := binary.BigEndian
	base := int64(be.Uint64(b))
	if len(b) > 16 && b[16] != 2 {
		return fmt.Errorf("partition %s has a message of format %d at offset %d, from before Kafka 0.11: such topics cannot be read", w.tp, b[16], base)
	}
	if len(b) < batchHeader || crc32.Checksum(b[21:], castagnoli) != be.Uint32(b[17:]) {
		return fmt.Errorf("partition %s has a corrupt batch at offset %d", w.tp, base)
	}
	end := base + int64(be.Uint32(b[23:])) + 1
	attributes, producer := be.Uint16(b[21:]), int64(be.Uint64(b[43:]))
	w.pass(base)
	_, aborted := w.dropped[producer]
	var err error
	switch transactional := attributes&0x10 != 0; {
	case attributes&0x20 != 0:
		delete(w.dropped, producer) // a marker ends the producer's transaction, this way or that
	case transactional && aborted, end <= w.from:
	default:
		err = w.records(b, base, attributes)
	}
	if err == nil {
		w.next = max(w.next, end)
	}
	return err
}

// pass takes up the aborted transactions that have begun by that offset.
func (w *walker) pass(base int64) {
	for len(w.aborted) > 0 && w.aborted[0].first <= base {
		if w.dropped == nil {
			w.dropped = map[int64]struct{}{}
		}
		w.dropped[w.aborted[0].producer] = struct{}{}
		w.aborted = w.aborted[1:]
	}
}

// maxDecompressed bounds what a batch expands to.
const maxDecompressed = 256 << 20

func (w *walker) records(b []byte, base int64, attributes uint16) error {
	be := binary.BigEndian
	n, firstMS, maxMS := int(int32(be.Uint32(b[57:]))), int64(be.Uint64(b[27:])), int64(be.Uint64(b[35:]))
	d := wire{b: b[batchHeader:]}
	if kind := compress.Compression(attributes & 7); kind != compress.None {
		plain, err := decompress(kind, d.b)
		if err != nil {
			return fmt.Errorf("partition %s at offset %d: %w", w.tp, base, err)
		}
		d.b = plain
	}
	epoch := int32(be.Uint32(b[12:]))
	kept := len(w.out)
	for ; n > 0; n-- {
		x := wire{b: d.bytes(int(d.varint()))}
		x.skip(1) // attributes
		ms := firstMS + x.varint()
		if attributes&0x08 != 0 {
			ms = maxMS // the broker's time of the append
		}
		r := Record{Topic: w.tp.Topic, Partition: w.tp.Partition, LeaderEpoch: epoch, Time: time.UnixMilli(ms).UTC()}
		r.Offset = base + x.varint()
		r.Key, r.Value = x.nullable(), x.nullable()
		for range x.varcount() {
			key := string(x.nullable())
			r.Headers = append(r.Headers, Header{Key: key, Value: x.nullable()})
		}
		if d.bad || x.bad {
			w.out = w.out[:kept]
			return fmt.Errorf("partition %s: a record of the batch at offset %d ends too early", w.tp, base)
		}
		if r.Offset >= w.from {
			w.out = append(w.out, r)
		}
	}
	return nil
}

func decompress(kind compress.Compression, b []byte) ([]byte, error) {
	codec := kind.Codec()
	if codec == nil {
		return nil, fmt.Errorf("compression %d is unknown", kind)
	}
	r := codec.NewReader(bytes.NewReader(b))
	out, err := io.ReadAll(io.LimitReader(r, maxDecompressed+1))
	if err = errors.Join(err, r.Close()); err != nil {
		return nil, fmt.Errorf("decompressing a batch: %w", err)
	}
	if len(out) > maxDecompressed {
		return nil, fmt.Errorf("a batch is larger than %d bytes", maxDecompressed)
	}
	return out, nil
}

// wire walks a buffer; reading past its end sets bad and yields zeros.
type wire struct {
	b   []byte
	bad bool
}

func (d *wire) bytes(n int) []byte {
	if n <= 0 {
		return nil
	}
	if n > len(d.b) {
		d.b, d.bad = nil, true
		return nil
	}
	x := d.b[:n:n]
	d.b = d.b[n:]
	return x
}

func (d *wire) skip(n int) { d.bytes(n) }

func (d *wire) i16() int16 {
	if x := d.bytes(2); x != nil {
		return int16(binary.BigEndian.Uint16(x))
	}
	return 0
}

func (d *wire) i32() int32 {
	if x := d.bytes(4); x != nil {
		return int32(binary.BigEndian.Uint32(x))
	}
	return 0
}

func (d *wire) i64() int64 {
	if x := d.bytes(8); x != nil {
		return int64(binary.BigEndian.Uint64(x))
	}
	return 0
}

// count is the length of an array; a null array has none, and no array has more elements than bytes are left.
func (d *wire) count() int { return max(0, min(int(d.i32()), len(d.b))) }

func (d *wire) varcount() int { return int(max(0, min(d.varint(), int64(len(d.b))))) }

func (d *wire) varint() int64 {
	x, n := binary.Varint(d.b)
	if n <= 0 {
		d.b, d.bad = nil, true
		return 0
	}
	d.b = d.b[n:]
	return x
}

// nullable is bytes with their length before them; nil for null alone.
func (d *wire) nullable() []byte {
	n := d.varint()
	switch {
	case n < 0:
		return nil
	case n == 0:
		return []byte{}
	}
	return d.bytes(int(min(n, int64(len(d.b))+1)))
}
