package mongodb

import (
	"go.mongodb.org/mongo-driver/v2/bson"
)

func IfNull(field string, otherwise any) bson.D {
	return bson.D{{Key: "$ifNull", Value: bson.A{field, otherwise}}}
}

func Literal(v any) bson.D { return bson.D{{Key: "$literal", Value: v}} }

func CloneValue(v bson.RawValue) bson.RawValue {
	return bson.RawValue{Type: v.Type, Value: append([]byte(nil), v.Value...)}
}
