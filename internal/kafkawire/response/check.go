package response

import (
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
	"github.com/segmentio/kafka-go/protocol/createpartitions"
	"github.com/segmentio/kafka-go/protocol/createtopics"
	"github.com/segmentio/kafka-go/protocol/describeconfigs"
	"github.com/segmentio/kafka-go/protocol/describegroups"
	"github.com/segmentio/kafka-go/protocol/endtxn"
	"github.com/segmentio/kafka-go/protocol/findcoordinator"
	"github.com/segmentio/kafka-go/protocol/heartbeat"
	"github.com/segmentio/kafka-go/protocol/initproducerid"
	"github.com/segmentio/kafka-go/protocol/joingroup"
	"github.com/segmentio/kafka-go/protocol/leavegroup"
	"github.com/segmentio/kafka-go/protocol/listgroups"
	"github.com/segmentio/kafka-go/protocol/listoffsets"
	"github.com/segmentio/kafka-go/protocol/metadata"
	"github.com/segmentio/kafka-go/protocol/offsetcommit"
	"github.com/segmentio/kafka-go/protocol/offsetfetch"
	"github.com/segmentio/kafka-go/protocol/produce"
	"github.com/segmentio/kafka-go/protocol/saslauthenticate"
	"github.com/segmentio/kafka-go/protocol/saslhandshake"
	"github.com/segmentio/kafka-go/protocol/syncgroup"
)

// responses has the types that kafka-go decodes, by API. Responses to other requests are rejected.
var responses = map[protocol.ApiKey]reflect.Type{
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
	protocol.CreatePartitions:   reflect.TypeFor[createpartitions.Response](),
	protocol.CreateTopics:       reflect.TypeFor[createtopics.Response](),
	protocol.InitProducerId:     reflect.TypeFor[initproducerid.Response](),
	protocol.AddPartitionsToTxn: reflect.TypeFor[addpartitionstotxn.Response](),
	protocol.EndTxn:             reflect.TypeFor[endtxn.Response](),
	protocol.DescribeConfigs:    reflect.TypeFor[describeconfigs.Response](),
	protocol.DescribeGroups:     reflect.TypeFor[describegroups.Response](),
	protocol.ListGroups:         reflect.TypeFor[listgroups.Response](),
	protocol.SaslAuthenticate:   reflect.TypeFor[saslauthenticate.Response](),
}

var errShort = errors.New("a length in it exceeds the bytes that follow")

// checkLengths reads a response without its correlation id, and returns an error unless all its lengths
// fit. It does not allocate. It ignores bytes after the last field, as kafka-go does.
func checkLengths(key protocol.ApiKey, version int16, body []byte) error {
	typ := responses[key]
	if typ == nil {
		return errors.New("the format of its responses is unknown")
	}

	decoder := &Decoder{B: body}
	planOf(typ, version)(decoder)
	if decoder.Bad {
		return errShort
	}
	return nil
}

// plan reads one value of a response and discards it.
type plan func(d *Decoder)

type planKey struct {
	typ     reflect.Type
	version int16
}

var plans sync.Map // planKey to plan

// planOf returns the plan of a response in a version. It derives it from the same struct tags as
// kafka-go's decoder. Plans are cached.
func planOf(typ reflect.Type, version int16) plan {
	key := planKey{typ, version}
	if known, ok := plans.Load(key); ok {
		return known.(plan)
	}

	flexible := false
	for i := range typ.NumField() {
		_, _, tagged := parseTag(typ.Field(i).Tag.Get("kafka"), version)
		flexible = flexible || tagged
	}
	body := structPlan(typ, version, flexible)
	known := body
	if flexible {
		// The header of a flexible response has tagged fields, too.
		known = func(decoder *Decoder) { decoder.SkipTags(); body(decoder) }
	}
	plans.Store(key, known)
	return known
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
		field := typ.Field(i)
		has, number, isTagged := parseTag(field.Tag.Get("kafka"), version)
		switch {
		case !has:
		case isTagged:
			tagged[number] = valuePlan(field.Type, version, flexible)
		case field.Name == "Assignments" && typ == reflect.TypeFor[syncgroup.Response]():
			fields = append(fields, assignmentPlan(flexible))
		default:
			fields = append(fields, valuePlan(field.Type, version, flexible))
		}
	}

	return func(decoder *Decoder) {
		for _, f := range fields {
			f(decoder)
		}
		if flexible {
			decoder.walkTags(tagged)
		}
	}
}

func valuePlan(typ reflect.Type, version int16, flexible bool) plan {
	switch typ.Kind() {
	case reflect.Bool, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64, reflect.Float64:
		size := int(typ.Size())
		return func(decoder *Decoder) { decoder.Skip(size) }

	case reflect.String:
		return func(decoder *Decoder) { decoder.nextField(flexible, func() int { return int(decoder.Int16()) }) }

	case reflect.Struct:
		return structPlan(typ, version, flexible)

	case reflect.Slice:
		if typ.Elem().Kind() == reflect.Uint8 {
			return func(decoder *Decoder) { decoder.nextField(flexible, func() int { return int(decoder.Int32()) }) }
		}
		element := valuePlan(typ.Elem(), version, flexible)
		return func(decoder *Decoder) {
			for n := decoder.arrayLength(flexible); n > 0 && !decoder.Bad; n-- {
				element(decoder)
			}
		}
	}
	panic(fmt.Sprintf("no plan for a field of type %v in responses of Kafka", typ))
}

// nextField returns the next string or bytes field. The length -1 means null.
func (d *Decoder) nextField(flexible bool, length func() int) []byte {
	if flexible {
		return d.CompactBytes()
	}
	n := length()
	d.Bad = d.Bad || n < -1
	return d.Bytes(n)
}

// arrayLength returns the length of an array, whose elements take at least one byte each. It rejects
// null in versions that are not flexible: no response has a null array in them, and parts of kafka-go
// panic at one.
func (d *Decoder) arrayLength(flexible bool) int {
	var n int
	if flexible {
		n = d.CompactLength()
	} else {
		n = int(d.Int32())
	}
	if n < 0 || n > len(d.B) {
		d.B, d.Bad = nil, true
		return 0
	}
	return n
}

// assignmentPlan returns the plan of the assignment that the leader of a consumer group has made.
// kafka-go decodes these bytes as well, and any member of the group may have written them.
func assignmentPlan(flexible bool) plan {
	// The assignment has no flexible version, also in a flexible response.
	const ownFlexible = false
	inner := structPlan(reflect.TypeFor[consumer.Assignment](), 0, ownFlexible)
	return func(decoder *Decoder) {
		in := &Decoder{B: decoder.nextField(flexible, func() int { return int(decoder.Int32()) })}
		if len(in.B) > 0 {
			inner(in)
		}
		decoder.Bad = decoder.Bad || in.Bad
	}
}
