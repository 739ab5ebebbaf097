package mongodb

import (
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// IfNull returns the expression for field, or for otherwise if the field is null or missing.
func IfNull(field string, otherwise any) bson.D {
	return bson.D{{Key: "$ifNull", Value: bson.A{field, otherwise}}}
}

// Literal returns the expression for value itself, even if value looks like a field or an operator.
func Literal(value any) bson.D { return bson.D{{Key: "$literal", Value: value}} }

// Fields returns the projection that selects the named fields and `_id`.
func Fields(names ...string) bson.D { return Ascending(names...) }

// CloneValue returns a copy of value that does not alias a response.
func CloneValue(value bson.RawValue) bson.RawValue {
	return bson.RawValue{Type: value.Type, Value: append([]byte(nil), value.Value...)}
}

// AfterNow returns the time duration after the server's current time, for an update by pipeline.
func AfterNow(duration time.Duration) bson.D {
	return bson.D{{Key: "$add", Value: bson.A{"$$NOW", duration.Milliseconds()}}}
}
