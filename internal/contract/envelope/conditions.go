package envelope

import (
	"math"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// The conditions in this file decide by its times what an envelope is. A list that contains a time is no time, neither here nor for
// [Parse]. But a comparison in a filter matches a list if one of its elements matches, and a list matches two bounds by two
// elements. Every filter on a time of an envelope therefore comes from here. A comparison with a time matches only values of its type.

// noList excludes lists from a comparison. The bounds beside it still limit what the server reads of an index.
var noList = bson.E{Key: "$not", Value: bson.D{{Key: "$type", Value: "array"}}}

// Stamped returns the condition for an envelope whose stamp is within bounds, such as $gt and $lte.
func Stamped(bounds ...bson.E) bson.E {
	return bson.E{Key: "ts", Value: append(slices.Clone(bson.D(bounds)), noList)}
}

// Scheduled returns the condition for an envelope with a due time within bounds. Without bounds, it is any time.
func Scheduled(bounds ...bson.E) bson.E { return bson.E{Key: "dueAt", Value: dateWithin(bounds)} }

// ScheduledEntry returns the condition of [Scheduled] for entries of the index on dueAt. It also finds lists that contain a time, because only a
// read of the document distinguishes them.
func ScheduledEntry() bson.E {
	return bson.E{Key: "dueAt", Value: bson.D{{Key: "$gte", Value: bson.DateTime(math.MinInt64)}}}
}

// Undelivered returns the condition for an envelope that the stream sends, or moves to the dead letters, and that the relay has not marked as
// delivered. It has no due time; a dueAt of another type is none. A service may store a field sentAt too, and a list sent, so a mark needs a
// place in the list, or an empty list. isMarked is the same for a document.
func Undelivered() bson.E {
	place := bson.D{
		{Key: "topic", Value: bson.D{{Key: "$type", Value: "string"}}},
		{Key: "offset", Value: bson.D{{Key: "$type", Value: "number"}}},
	}
	marked := bson.D{Marked(), {Key: "$or", Value: bson.A{
		bson.D{{Key: "sent", Value: bson.D{{Key: "$size", Value: 0}}}},
		bson.D{{Key: "sent", Value: bson.D{{Key: "$elemMatch", Value: place}}}},
	}}}
	return bson.E{Key: "$nor", Value: bson.A{bson.D{Scheduled()}, marked}}
}

// isMarked reports whether the relay has marked the document as delivered.
func isMarked(doc []byte) bool {
	if at, _ := findField(doc, "sentAt"); at != bson.TypeDateTime {
		return false
	}
	kind, list := findField(doc, "sent")
	places, ok := openDocument(list)
	if kind != bson.TypeArray || !ok {
		return false
	}

	for empty := true; ; empty = false {
		if !places.next() {
			return empty && !places.broken
		}
		if places.typ != bson.TypeEmbeddedDocument {
			continue
		}
		topic, _ := findField(places.val, "topic")
		offset, number := findField(places.val, "offset")
		if _, isNumber := integerValue(&cursor{typ: offset, val: number}); topic == bson.TypeString && isNumber {
			return true
		}
	}
}

// Marked returns the condition for an envelope with the time of its delivery.
func Marked() bson.E { return bson.E{Key: "sentAt", Value: dateWithin(nil)} }

func dateWithin(bounds bson.D) bson.D {
	if len(bounds) == 0 {
		bounds = bson.D{{Key: "$type", Value: "date"}}
	}
	return append(slices.Clone(bounds), noList)
}
