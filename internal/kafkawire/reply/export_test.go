package reply

import (
	"iter"
	"maps"
	"reflect"

	"github.com/segmentio/kafka-go/protocol"
)

// Keys returns the APIs whose replies are checked.
func Keys() iter.Seq[protocol.ApiKey] { return maps.Keys(replies) }

// TypeOf returns the type of an API's reply.
func TypeOf(key protocol.ApiKey) reflect.Type { return replies[key] }
