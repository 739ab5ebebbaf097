package reply

import (
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"

	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/addpartitionstotxn"
	"github.com/segmentio/kafka-go/protocol/apiversions"
	"github.com/segmentio/kafka-go/protocol/consumer"
	"github.com/segmentio/kafka-go/protocol/createtopics"
	"github.com/segmentio/kafka-go/protocol/describeconfigs"
	"github.com/segmentio/kafka-go/protocol/endtxn"
	"github.com/segmentio/kafka-go/protocol/findcoordinator"
	"github.com/segmentio/kafka-go/protocol/heartbeat"
	"github.com/segmentio/kafka-go/protocol/initproducerid"
	"github.com/segmentio/kafka-go/protocol/joingroup"
	"github.com/segmentio/kafka-go/protocol/leavegroup"
	"github.com/segmentio/kafka-go/protocol/listoffsets"
	"github.com/segmentio/kafka-go/protocol/metadata"
	"github.com/segmentio/kafka-go/protocol/offsetcommit"
	"github.com/segmentio/kafka-go/protocol/offsetfetch"
	"github.com/segmentio/kafka-go/protocol/produce"
	"github.com/segmentio/kafka-go/protocol/saslauthenticate"
	"github.com/segmentio/kafka-go/protocol/saslhandshake"
	"github.com/segmentio/kafka-go/protocol/syncgroup"
)

// replies has the types that kafka-go decodes, by API. Replies to other requests are rejected.
var replies = map[protocol.ApiKey]reflect.Type{
	protocol.Produce:            reflect.TypeFor[produce.Response](),
	protocol.ListOffsets:        reflect.TypeFor[listoffsets.Response](),
	protocol.Metadata:           reflect.TypeFor[metadata.Response](),
	protocol.OffsetCommit:       reflect.TypeFor[offsetcommit.Response](),
	protocol.OffsetFetch:        reflect.TypeFor[offsetfetch.Response](),
	protocol.FindCoordinator:    reflect.TypeFor[findcoordinator.Response](),
	protocol.JoinGroup:          reflect.TypeFor[joingroup.Response](),
	protocol.Heartbeat:          reflect.TypeFor[heartbeat.Response](),
	protocol.LeaveGroup:         reflect.TypeFor[leavegroup.Response](),
	protocol.SyncGroup:          reflect.TypeFor[syncgroup.Response](),
	protocol.SaslHandshake:      reflect.TypeFor[saslhandshake.Response](),
	protocol.ApiVersions:        reflect.TypeFor[apiversions.Response](),
	protocol.CreateTopics:       reflect.TypeFor[createtopics.Response](),
	protocol.InitProducerId:     reflect.TypeFor[initproducerid.Response](),
	protocol.AddPartitionsToTxn: reflect.TypeFor[addpartitionstotxn.Response](),
	protocol.EndTxn:             reflect.TypeFor[endtxn.Response](),
	protocol.DescribeConfigs:    reflect.TypeFor[describeconfigs.Response](),
	protocol.SaslAuthenticate:   reflect.TypeFor[saslauthenticate.Response](),
}

// epochEnds is the reply to OffsetForLeaderEpoch, which kafka-go does not support.
type epochEnds struct {
	ThrottleTimeMs int32        `kafka:"min=v3,max=v3"`
	Topics         []epochTopic `kafka:"min=v3,max=v3"`
}

type epochTopic struct {
	Topic      string           `kafka:"min=v3,max=v3"`
	Partitions []epochPartition `kafka:"min=v3,max=v3"`
}

type epochPartition struct {
	ErrorCode   int16 `kafka:"min=v3,max=v3"`
	Partition   int32 `kafka:"min=v3,max=v3"`
	LeaderEpoch int32 `kafka:"min=v3,max=v3"`
	EndOffset   int64 `kafka:"min=v3,max=v3"`
}

var errShort = errors.New("a length in it exceeds the bytes that follow")

// checkLengths reads a reply without its correlation id, and returns an error unless all its lengths
// fit. It does not allocate. It ignores bytes after the last field, as kafka-go does.
func checkLengths(key protocol.ApiKey, version int16, body []byte) error {
	typ := replies[key]
	if key == protocol.OffsetForLeaderEpoch && version == 3 {
		typ = reflect.TypeFor[epochEnds]()
	}
	if typ == nil {
		return errors.New("the format of its replies is unknown")
	}

	w := &walker{b: body}
	planOf(typ, version)(w)
	if w.bad {
		return errShort
	}
	return nil
}

// walker holds the rest of a reply that is being read.
type walker struct {
	b   []byte
	bad bool
}

// nextBytes returns the next n bytes. After the end it sets bad and returns zeros, at most 8.
func (w *walker) nextBytes(n int) []byte {
	if n < 0 || n > len(w.b) {
		w.bad, w.b = true, nil
		return make([]byte, 8)[:max(0, min(n, 8))]
	}
	x := w.b[:n]
	w.b = w.b[n:]
	return x
}

func (w *walker) int16() int { return int(int16(binary.BigEndian.Uint16(w.nextBytes(2)))) }
func (w *walker) int32() int { return int(int32(binary.BigEndian.Uint32(w.nextBytes(4)))) }

// uvarint returns a length or a count of a flexible version. Such a number is the value plus one. Zero
// means null.
func (w *walker) uvarint() int {
	x, n := binary.Uvarint(w.b)
	if n <= 0 || x > maxReply {
		w.bad, w.b = true, nil
		return 0
	}
	w.b = w.b[n:]
	return int(x)
}

// plan reads one value of a reply and discards it.
type plan func(w *walker)

type planKey struct {
	typ     reflect.Type
	version int16
}

var plans sync.Map // planKey to plan

// planOf returns the plan of a reply in a version. It derives it from the same struct tags as
// kafka-go's decoder. Plans are cached.
func planOf(typ reflect.Type, version int16) plan {
	k := planKey{typ, version}
	if p, ok := plans.Load(k); ok {
		return p.(plan)
	}

	flexible := false
	for i := range typ.NumField() {
		_, _, tagged := parseTag(typ.Field(i).Tag.Get("kafka"), version)
		flexible = flexible || tagged
	}
	body := structPlan(typ, version, flexible)
	p := body
	if flexible {
		// The header of a flexible reply has tagged fields, too.
		p = func(w *walker) { w.skipTagged(nil); body(w) }
	}
	plans.Store(k, p)
	return p
}

// parseTag parses a struct tag like "min=v0,max=v3|min=v4,max=v5,tag=0". It reports whether the version
// has the field, and returns the number of a tagged field. A tag without a number (-1) only marks a
// flexible message.
func parseTag(tag string, version int16) (has bool, number int, tagged bool) {
	for part := range strings.SplitSeq(tag, "|") {
		lowest, highest := -1, -1
		number, tagged = -1, false
		for option := range strings.SplitSeq(part, ",") {
			name, value, _ := strings.Cut(option, "=")
			n, err := strconv.Atoi(strings.TrimPrefix(value, "v"))
			switch {
			case name == "tag":
				tagged = true
				if err == nil {
					number = n
				}
			case name == "min" && err == nil:
				lowest = n
			case name == "max" && err == nil:
				highest = n
			}
		}

		if lowest >= 0 && lowest <= int(version) && int(version) <= highest {
			return true, number, tagged
		}
	}
	return false, 0, false
}

func structPlan(typ reflect.Type, version int16, flexible bool) plan {
	var fields []plan
	tagged := map[int]plan{}
	for i := range typ.NumField() {
		f := typ.Field(i)
		has, number, isTagged := parseTag(f.Tag.Get("kafka"), version)
		switch {
		case !has:
		case isTagged:
			tagged[number] = valuePlan(f.Type, version, flexible)
		case f.Name == "Assignments" && typ == reflect.TypeFor[syncgroup.Response]():
			fields = append(fields, assignmentPlan(flexible))
		default:
			fields = append(fields, valuePlan(f.Type, version, flexible))
		}
	}

	return func(w *walker) {
		for _, f := range fields {
			f(w)
		}
		if flexible {
			w.skipTagged(tagged)
		}
	}
}

// skipTagged reads the tagged fields at the end of a structure.
func (w *walker) skipTagged(known map[int]plan) {
	for n := w.uvarint(); n > 0 && !w.bad; n-- {
		number, size := w.uvarint(), w.uvarint()
		if f := known[number]; f != nil {
			f(w)
		} else {
			w.nextBytes(size)
		}
	}
}

func valuePlan(typ reflect.Type, version int16, flexible bool) plan {
	switch typ.Kind() {
	case reflect.Bool, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64, reflect.Float64:
		size := int(typ.Size())
		return func(w *walker) { w.nextBytes(size) }

	case reflect.String:
		return func(w *walker) { w.nextField(flexible, (*walker).int16) }

	case reflect.Struct:
		return structPlan(typ, version, flexible)

	case reflect.Slice:
		if typ.Elem().Kind() == reflect.Uint8 {
			return func(w *walker) { w.nextField(flexible, (*walker).int32) }
		}
		element := valuePlan(typ.Elem(), version, flexible)
		return func(w *walker) {
			for n := w.arrayLength(flexible); n > 0 && !w.bad; n-- {
				element(w)
			}
		}
	}
	panic(fmt.Sprintf("no plan for a field of type %v in replies of Kafka", typ))
}

// nextField returns the next string or bytes field. The length -1 means null.
func (w *walker) nextField(flexible bool, length func(*walker) int) []byte {
	if flexible {
		return w.nextBytes(max(w.uvarint()-1, 0))
	}
	n := length(w)
	if n == -1 {
		return nil
	}
	return w.nextBytes(n)
}

// arrayLength returns the length of an array, whose elements take at least one byte each. It rejects
// null in versions that are not flexible: no reply has a null array in them, and parts of kafka-go
// panic at one.
func (w *walker) arrayLength(flexible bool) int {
	var n int
	if flexible {
		n = max(w.uvarint()-1, 0)
	} else {
		n = w.int32()
	}
	if n < 0 || n > len(w.b) {
		w.bad, w.b = true, nil
		return 0
	}
	return n
}

// assignmentPlan returns the plan of the assignment that the leader of a consumer group has made.
// kafka-go decodes these bytes as well, and any member of the group may have written them.
func assignmentPlan(flexible bool) plan {
	inner := structPlan(reflect.TypeFor[consumer.Assignment](), 0, false)
	return func(w *walker) {
		in := &walker{b: w.nextField(flexible, (*walker).int32)}
		if len(in.b) > 0 {
			inner(in)
		}
		w.bad = w.bad || in.bad
	}
}
