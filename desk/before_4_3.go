package desk

// countsPeeks is the text of WarningLimit.
const countsPeeks = "RabbitMQ below 4.3 counts each look as a delivery, and the queue's limit is %d: messages that reach it are dead-lettered or dropped"
