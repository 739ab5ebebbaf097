package entity

// The stores in MongoDB, for the tests of their contract.
var (
	OnMongo     = onMongo
	OnMongoView = onMongoView
)
