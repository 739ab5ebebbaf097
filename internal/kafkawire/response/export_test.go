package response

import (
	"iter"
	"maps"
	"reflect"

	"github.com/segmentio/kafka-go/protocol"
)

// Keys returns the APIs whose responses are checked.
func Keys() iter.Seq[protocol.ApiKey] { return maps.Keys(responses) }

// TypeOf returns the type of an API's response.
func TypeOf(key protocol.ApiKey) reflect.Type { return responses[key] }
