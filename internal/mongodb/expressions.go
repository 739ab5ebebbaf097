package mongodb

import (
	"go.mongodb.org/mongo-driver/v2/bson"
)

// IfNull returns the expression for field, or for otherwise if the field is null or missing.
func IfNull(field string, otherwise any) bson.D {
	return bson.D{{Key: "$ifNull", Value: bson.A{field, otherwise}}}
}

// Literal returns the expression for v itself, even if v looks like a field or an operator.
func Literal(v any) bson.D { return bson.D{{Key: "$literal", Value: v}} }

// CloneValue returns a copy of v that does not alias a reply.
func CloneValue(v bson.RawValue) bson.RawValue {
	return bson.RawValue{Type: v.Type, Value: append([]byte(nil), v.Value...)}
}
